"""The EAGLE-3 draft head (arXiv 2503.01840): a decoder of one or a few layers that reads a token
and a hidden state, with the norms of EAGLE-3.1 (arXiv 2605.09992) and of speculators' heads. A
P-EAGLE head reads a mask token and `mask_hidden` where it has neither, so that it drafts all tokens
in one forward.

The state comes from the target (`fuse`) or from the head's own previous step. The embedding is the
target's, and without a draft vocabulary the output layer too, unless the checkpoint has others.
Requests, pages and the drafting loop are not known here."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.drafts.draft_input import DraftInput, DraftInputNorms, draft_input
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.causal_lm import CausalLM
from tllm_spec.models.deepseek import DeepseekLayer, LatentAttention
from tllm_spec.models.draft_head import BorrowedModules, HeadSource, Masks, SteppedHead
from tllm_spec.models.eagle3_checkpoint import eagle3_tensors
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.feature_head import fill_head
from tllm_spec.models.layers import Embedding, RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import MLP, Attention, DecoderLayer, SelfAttention
from tllm_spec.models.module import Module, Placement
from tllm_spec.models.rotary import cos_sin_table


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


class Eagle3Head(SteppedHead):
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
        self.borrowed = BorrowedModules.of(
            target, tied=config.tie_word_embeddings, placement=placement
        )
        is_tied = config.tie_word_embeddings
        self._add_own(owns, config.output_size, placement, is_tied=is_tied)
        self.cos_sin = cos_sin_table(config.rope, config.rope_dim, max_positions, placement)
        self.draft_to_target = None
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

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """The states after the final norm with `norm_output`, otherwise those before it."""
        rotary = Rotary(self.cos_sin, positions)
        first, *later = self.layers
        wanted = context.wanted
        total = first.forward(
            input_ids,
            self.embedding,
            hidden,
            rotary,
            context,
            None if later else wanted,
        )
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
    head = fill_head(Eagle3Head, config, source, num_captured, eagle3_tensors)
    head.derive_masks()
    return head
