"""The EAGLE-3 draft head (arXiv 2503.01840): a decoder of one or a few layers that reads a token
and a hidden state, with the norms of EAGLE-3.1 (arXiv 2605.09992) and of speculators' heads. A
P-EAGLE head reads a mask token and `mask_hidden` where it has neither, so that it drafts all tokens
in one forward.

The state comes from the target (`fuse`) or from the head's own previous step. The embedding is the
target's, and without a draft vocabulary the output layer too, unless the checkpoint has others.
Requests, pages and the drafting loop are not known here."""

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.drafts.draft_input import DraftInput, DraftInputNorms, draft_input
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.checkpoint import OUTPUT
from tllm_spec.models.deepseek import DeepseekLayer, LatentAttention
from tllm_spec.models.draft_head import (
    EMBEDDING,
    DraftHead,
    HeadRows,
    HeadSource,
    Masks,
    drop_copies,
    head_tensors,
)
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.layers import Embedding, Module, Placement, RMSNorm, specialize_for_cpu
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import MLP, Attention, CausalLM, DecoderLayer, SelfAttention
from tllm_spec.models.token_map import as_ids, check_ids
from tllm_spec.models.weights import fill, fill_random

# `midlayer` is the name in the paper's code; `aux_norm_*` came before the numbered norms.
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# The rotary table is computed, and the verifier's modules are for training.
_UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def eagle3_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The memory-mapped tensors of the head in the folder `path`, as `input_norm.weight`,
    `fc_norm.{i}.weight`, `fc.*`, `layers.{i}.*`, `norm.weight`, `embed_tokens.weight`,
    `lm_head.weight`, `d2t` and `t2d`.

    Raises:
        ValueError: no checkpoint, a file that is not readable, or two tensors of one name.
    """
    return head_tensors(path, "EAGLE-3", _UNUSED, _RENAMED)


def check_sizes(tensors: dict[str, torch.Tensor], config: Eagle3Config, num_captured: int) -> None:
    """Raises ValueError where the checkpoint contradicts the number of captured layers or the draft
    vocabulary, or lacks an embedding or an output layer that cannot be the target's."""
    if "fc.weight" not in tensors:
        raise ValueError(
            f"The checkpoint has no fc.weight; {config.kind} heads that do not fuse captured "
            "states of the target with it are not served."
        )
    in_features, size = tensors["fc.weight"].shape[-1], config.target_hidden_size
    if in_features != num_captured * size:
        raise ValueError(
            f"fc.weight of the {config.kind} head takes {in_features} inputs; {num_captured} "
            f"captured layers of {size} each give {num_captured * size}. Set "
            "eagle3_layers_to_capture (of DFlash: target_layer_ids) to as many layers as the head "
            "was trained on."
        )
    _check_own_modules(tensors, config)
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    if rows not in (None, config.vocab_size) and config.draft_vocab_size is None:
        raise ValueError(
            f"The {config.kind} head has an lm_head.weight of {rows} rows and draft_vocab_size is "
            "null, which means the target's output layer; set draft_vocab_size to "
            f"{rows} in the head's config.json."
        )
    if rows not in (None, config.output_size):
        raise ValueError(
            f"lm_head.weight of the {config.kind} head has {rows} rows; draft_vocab_size is "
            f"{config.draft_vocab_size}."
        )


def _check_own_modules(tensors: dict[str, torch.Tensor], config: Eagle3Config) -> None:
    """See `check_sizes`."""
    is_tied = config.tie_word_embeddings
    needed = [EMBEDDING, *([] if is_tied else [OUTPUT])] if config.has_own_width else []
    if lacking := [name for name in needed if name not in tensors]:
        raise ValueError(
            f"hidden_size of the {config.kind} head is {config.hidden_size}, the target's is "
            f"{config.target_hidden_size}; such a head needs its own {' and '.join(lacking)}, "
            "which its checkpoint lacks."
        )
    if is_tied and config.output_size < config.vocab_size and OUTPUT not in tensors:
        raise ValueError(
            f"tie_word_embeddings is true and draft_vocab_size is {config.draft_vocab_size}; the "
            f"embeddings of all {config.vocab_size} tokens cannot be the output layer of fewer, "
            f"and the checkpoint has no {OUTPUT}."
        )


def target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, config: Eagle3Config
) -> torch.Tensor | None:
    """`[V_draft]` ids of the target; None: they are the draft's.

    `d2t` holds target id - draft id. Some heads have the target ids themselves there: so it is read
    where `t2d` `[V]`, which marks the ids, says so. A `t2d` that does not mark V_draft ids says
    nothing.

    Raises:
        ValueError: `d2t` is missing where it is needed, misshapen, leads out of the target's
        vocabulary, to one token twice, or to other tokens than `t2d`.
    """
    size, vocab_size = config.output_size, config.vocab_size
    if d2t is None:
        if size < vocab_size:
            raise ValueError(
                f"The checkpoint has no d2t; draft_vocab_size {size} of vocab_size {vocab_size} "
                "needs one."
            )
        return None
    integers = as_ids(d2t)
    if integers is None or len(integers) != size:
        raise ValueError(
            f"d2t has the shape {list(d2t.shape)} and the type {d2t.dtype}; it must be "
            f"{size} integers."
        )
    own_ids = torch.arange(size)
    ids = own_ids + integers
    marked = torch.empty(0) if t2d is None else t2d.flatten().nonzero().flatten()
    is_marked = len(marked) == size
    if is_marked and not _are(ids, marked) and _are(integers, marked):
        ids = integers
    check_ids(ids, vocab_size, f"d2t of the {config.kind} head leads to")
    if is_marked and not _are(ids, marked):
        raise ValueError(
            f"d2t of the {config.kind} head leads to other tokens than its t2d marks, read as "
            "offsets and as ids of the target."
        )
    return None if size == vocab_size and ids.equal(own_ids) else ids


def _are(ids: torch.Tensor, marked: torch.Tensor) -> bool:
    return ids.sort().values.equal(marked)


Config = TypeVar("Config", bound=Eagle3Config)
Head = TypeVar("Head", bound=DraftHead)


def fill_head(
    kind: Callable[[Config, CausalLM, int, int, Placement, Collection[str]], Head],
    config: Config,
    source: HeadSource,
    num_captured: int,
    unused: tuple[str, ...],
    renamed: Mapping[str, str],
) -> Head:
    """A head with this config, which fits the target. kind: the class of heads. The others are
    as in `head_tensors`. Raises ValueError if the checkpoint does not fit it."""
    placement = source.placement
    arguments = config, source.target, num_captured, source.max_positions, placement
    if source.load_format == "dummy":
        head = kind(*arguments, config.own_modules)
        _fill_dummy(head, config)
    else:
        tensors = head_tensors(source.path, config.kind, unused, renamed)
        check_sizes(tensors, config, num_captured)
        ids = target_ids(tensors.pop("d2t", None), tensors.pop("t2d", None), config)
        head = kind(*arguments, _own_modules(tensors, ids, config, source))
        head.draft_to_target = None if ids is None else ids.to(head.device)
        fill(
            head,
            tensors.items(),
            f"The checkpoint in {source.path} does not fit its config.json (layers.0 is the layer "
            "that some spell midlayer)",
        )
    specialize_for_cpu(head, placement)
    return head


def _own_modules(
    tensors: dict[str, torch.Tensor],
    ids: torch.Tensor | None,
    config: Eagle3Config,
    source: HeadSource,
) -> Set[str]:
    """The embedding and the output layer if they are not the target's, whose copies are removed
    from `tensors`. With `ids` of its own a head must have an output layer."""
    if ids is not None:
        output = {OUTPUT: tensors.pop(OUTPUT)} if OUTPUT in tensors else {}
        drop_copies(tensors, source)
        tensors |= output
        return tensors.keys() | {OUTPUT}
    drop_copies(tensors, source, is_tied=config.tie_word_embeddings)
    return tensors.keys()


def _fill_dummy(head: DraftHead, config: Eagle3Config) -> None:
    """The ids of a reduced vocabulary are spread evenly over the target's."""
    fill_random(head)
    size, vocab_size = config.output_size, config.vocab_size
    if size < vocab_size:
        head.draft_to_target = torch.arange(size, device=head.device) * vocab_size // size


class Eagle3Layer(Module):
    """The first layer. Its attention reads the normed embedding and the normed hidden state,
    concatenated; the residual is the hidden state alone, normed or not (`norm_before_residual`)."""

    def __init__(self, config: Eagle3Config, placement: Placement) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, placement)
        self.hidden_norm = RMSNorm(size, eps, placement)
        self._norms = DraftInputNorms(self.input_layernorm.weight, self.hidden_norm.weight, eps)
        kind = Attention if config.mla is None else LatentAttention
        self.self_attn: SelfAttention = kind(config, 0, placement, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps, placement)
        self.mlp = MLP(config, placement)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        input_ids: torch.Tensor,
        embedding: Embedding,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream after the block, `[T, H]`, or `[R, H]` of the rows `wanted`. `hidden`
        is not changed."""
        given = self._input(input_ids, embedding, hidden, rotary, wanted)
        if not len(given.total):
            self.self_attn.write(given.both, None, given.rotary, context)
            return given.total
        attended = self.self_attn.forward(given.both, None, given.rotary, context)
        if wanted is not None:
            attended = gather_rows(attended, wanted)
        self.self_attn.o_proj.add_to(given.total, attended)
        self.mlp.add_to(given.total, self.post_attention_layernorm)
        return given.total

    def _input(
        self,
        input_ids: torch.Tensor,
        embedding: Embedding,
        hidden: torch.Tensor,
        rotary: Rotary,
        wanted: torch.Tensor | None,
    ) -> DraftInput:
        """See `draft_input`. The norms that are specialised for a CPU are faster there than its
        reference."""
        if self.hidden_norm.scaled_weight is None:
            looked_up = embedding.lookup(input_ids)
            given = draft_input(*looked_up, hidden, self._norms, rotary, wanted)
            if self.norm_before_residual and len(given.total):
                normed = given.both[:, hidden.shape[1] :]
                return replace(given, total=_copied_rows(normed, wanted))
            return given
        embedded = self.input_layernorm.forward(embedding.forward(input_ids))
        normed = self.hidden_norm.forward(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((embedded, normed), -1)
        return DraftInput(both, _copied_rows(residual, wanted), rotary)


def _copied_rows(rows: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """A contiguous copy of all rows, or of `wanted`."""
    if wanted is not None:
        return gather_rows(rows, wanted)
    return rows.clone(memory_format=torch.contiguous_format)


class Eagle3Head(DraftHead):
    """Module paths are the checkpoint's names (`eagle3_checkpoint.py`), with q/k/v and gate/up
    fused."""

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        target: CausalLM,
        num_captured: int,
        max_positions: int,
        placement: Placement,
        owns: Collection[str],
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        self.config = config
        self.num_captured = num_captured
        size, target_size, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        fused_size = num_captured * target_size
        self.input_norm = RMSNorm(fused_size, eps, placement) if config.norm_before_fc else None
        norms = num_captured if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(target_size, eps, placement) for _ in range(norms))
        self.fc = Linear(fused_size, size, bias=config.bias, placement=placement)
        kind = DecoderLayer if config.mla is None else DeepseekLayer
        later = (kind(config, layer, placement) for layer in range(1, config.num_layers))
        self.layers = nn.ModuleList([Eagle3Layer(config, placement), *later])
        self.norm = RMSNorm(size, eps, placement)
        ends, is_tied = (target, owns, max_positions, placement), config.tie_word_embeddings
        self._add_ends(*ends, rows=config.output_size, is_tied=is_tied)
        if config.mask_token is not None:
            self.mask_hidden = placement.parameter(1, 1, fused_size)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        if not self.config.fc_norm:
            return self.fc.forward(captured, self.input_norm)
        if self.input_norm is not None:
            captured = self.input_norm.forward(captured)
        states = captured.chunk(self.num_captured, -1)
        normed = [norm.forward(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        return self.fc.forward(torch.cat(normed, -1))

    def derive_masks(self) -> None:
        """Called when the weights are there."""
        if (token := self.config.mask_token) is not None:
            self.masks = Masks(token, self.fuse(self.mask_hidden.flatten(0, 1)))

    def leave_fuse(self) -> None:
        """Frees all weights but those of `fuse`, after which nothing else can be called."""
        self.layers, self.embed_tokens, self.lm_head = nn.ModuleList(), None, None
        del self.norm, self.cos_sin

    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        """The states after the final norm with `norm_output`, otherwise those before it."""
        input_ids, positions, hidden = rows
        rotary, wanted = Rotary(self.cos_sin, positions), context.wanted
        first, *later = self.layers
        own = input_ids, self.embedding, hidden, rotary, context
        total = first.forward(*own, None if later else wanted)
        for layer in later:
            total = layer.forward(total, rotary, context, wanted if layer is later[-1] else None)
        return self.norm.forward(total) if self.config.norm_output and len(total) else total

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output.forward(hidden, None if self.config.norm_output else self.norm)


def load_eagle3_head(source: HeadSource, num_captured: int) -> Eagle3Head:
    """num_captured: how many layers of the target are captured for `fuse`.

    Raises:
        ValueError: the config or the checkpoint is not served or does not fit the target; the
        message says why.
    """
    config = Eagle3Config.from_pretrained(source.path)
    config = config.for_target(source.target.config, num_captured).within(source.max_positions)
    head = fill_head(Eagle3Head, config, source, num_captured, _UNUSED, _RENAMED)
    head.derive_masks()
    return head
