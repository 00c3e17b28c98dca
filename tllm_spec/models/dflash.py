"""The DFlash, DFlash2 and DSpark draft heads: a few decoder layers that fill in a block of mask
tokens at once, and in the latter two a correction from each draft to the next.

Every layer's keys and values of the text are made of the target's hidden states, once for each
token (step 0 of `forward`). The block is the newest token, which the target has not read yet, and
mask tokens; its rows see the text and the whole block. The row at a position drafts the token at
that position, or in DSpark the token after it. Requests, pages and the drafting loop are not known
here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.config import SLIDING, ModelConfig
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import Block, DraftHead, HeadRows, HeadSource, Masks
from tllm_spec.models.draft_kind import HeadKind, kind_by
from tllm_spec.models.eagle3 import fill_head
from tllm_spec.models.eagle3_config import DECODER_KEYS, Eagle3Config, check_head, unknown_keys
from tllm_spec.models.layers import Module, Placement, RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import MLP, CausalLM, DecoderLayer
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.step_correction import CandidateSelector, Confidence, MarkovHead, MarkovKind

# The shape of a head, read from its `config.json`.
#
# Two spellings are in use: a flat Qwen3 or Llama config that nests some keys under `dflash_config`
# (z-lab; DSpark's nests none), and the speculators format (vllm-project/speculators), which nests
# the layers' keys under `transformer_layer_config`. Layers of the target are counted by their
# outputs in the first, and by the states that enter them in the second.


_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}  # by model_type
# Variants that are not implemented, each with the value that means that the head is without it.
_SERVED: Mapping[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_gemma_norm": False,
    "is_neox_style": True,
    "output_multiplier": 1,
    "input_embedding_scale": 1,
}
_OF_DFLASH = DECODER_KEYS | {
    *("block_size", "mask_token_id", "target_layer_ids", "draft_vocab_size", "target_hidden_size"),
    *("num_target_layers", "swa_window_size", "use_swa", "mask_token", "is_causal", "causal"),
    *("sample_from_anchor", "sliding_window_non_causal"),
}
_OF_DFLASH2 = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
_OF_DSPARK = {
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    "num_anchors",
}
# DSpark's other names.
_ALIASES = {
    "dspark_block_size": "block_size",
    "dspark_markov_rank": "markov_rank",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Eagle3Config):
    """`block_size`: the newest token and the mask tokens after it, at most. `markov_head_type`: how
    DSpark corrects the logits from draft to draft, by a product of rank `markov_rank`; None: not at
    all. `confidence`: whether it says how likely its drafts are; `reads_previous`: also by the
    token before. `conv`: rows and channels of a group that DFlash2's convolutions read; `selector`:
    its rank and number of candidates."""

    kind: HeadKind = "DFlash"
    block_size: int
    block: Block
    markov_head_type: MarkovKind | None = None
    markov_rank: int = 0
    confidence: bool = False
    reads_previous: bool = False
    conv: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None

    @classmethod
    def from_pretrained(cls, path: Path) -> "DFlashConfig":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        if (path / "mask_embedding.pt").exists():
            raise ValueError(f"{path / 'mask_embedding.pt'}: mask embeddings are not served.")
        raw = read_config(path)
        kind = kind_by(raw, tuple) or "DFlash"
        flat = _flat(raw, kind)
        decoder = model_config_of(flat)
        config = cls(
            **vars(decoder) | {"unknown_keys": flat["unknown_keys"]},
            draft_vocab_size=flat.get("draft_vocab_size"),
            target_hidden_size=int(flat.get("target_hidden_size") or flat["hidden_size"]),
            capture_layers=flat["capture_layers"],
            mask_token=flat.get("mask_token_id"),
            block_size=flat.get("block_size") or 16,
            kind=kind,
            block=_block(flat, kind, decoder),
            **_FURTHER.get(kind, lambda _: {})(flat),
        )
        check_head(config)
        return config

    @property
    def max_drafts(self) -> int:
        """Rows of the block that draft."""
        return self.block_size - self.block.first

    def within(self, max_positions: int) -> "DFlashConfig":
        """Windows that no text reaches stay where they decide what a row sees of its block."""
        of_full, of_windowed = self.block.is_causal
        return super().within(max_positions) if of_full == of_windowed else self

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose outputs a head reads that does not name them: one for each of
        its own, evenly spread."""
        number = self.num_layers
        if number == 1:
            return (num_target_layers // 2,)
        last = num_target_layers - 4
        return tuple(round(1 + index * last / (number - 1)) for index in range(number))


def _flat(raw: dict[str, Any], kind: HeadKind) -> dict[str, Any]:
    """The keys on one level, with the layers as `capture_layers`."""
    layer: dict[str, Any] = raw.get("transformer_layer_config") or {}
    nested: dict[str, Any] = raw.get("dflash_config") or {}
    outer = {
        _ALIASES.get(key, key): value
        for key, value in raw.items()
        if key not in ("transformer_layer_config", "dflash_config")
    }
    flat = layer | outer | nested
    entering = flat.pop("aux_hidden_state_layer_ids", None)
    model_type = layer.get("model_type") or raw.get("model_type", "qwen3")
    if model_type not in _ARCHITECTURES:
        raise ValueError(
            f"model_type of the {kind} head is {model_type!r}; served are "
            f"{', '.join(_ARCHITECTURES)}."
        )
    flat["architectures"] = [_ARCHITECTURES[model_type]]
    flat.setdefault("tie_word_embeddings", False)
    if flat.get("use_swa") and SLIDING not in (flat.get("layer_types") or ()):
        sliding = [SLIDING] * int(flat["num_hidden_layers"])
        flat |= {"layer_types": sliding, "sliding_window_non_causal": True}
    if SLIDING in (flat.get("layer_types") or ()):
        window = flat.get("swa_window_size") or flat.get("sliding_window")
        flat |= {"use_sliding_window": True, "sliding_window": window}
    own = {"DSpark": _OF_DSPARK, "DFlash2": _OF_DFLASH2}.get(kind, set())
    unknown = unknown_keys(flat, _OF_DFLASH | own, _SERVED, kind)
    layers = flat.get("target_layer_ids") or [each - 1 for each in entering or ()]
    return flat | {"capture_layers": tuple(layers) or None, "unknown_keys": unknown}


def _block(flat: Mapping[str, Any], kind: HeadKind, decoder: ModelConfig) -> Block:
    """Without a key for all layers, rows see the whole block in layers that see the whole text, and
    the block up to themselves in layers with a window."""
    first = 0 if flat.get("sample_from_anchor", kind == "DSpark") else 1
    causal = flat.get("is_causal", flat.get("causal"))
    whole, windows = bool(causal), not flat.get("sliding_window_non_causal", kind == "DFlash2")
    if causal is not None:
        windows = whole
    number = len(decoder.sliding_layers)
    if not number:
        windows = whole
    elif number == decoder.num_layers:
        whole = windows
    return Block(first, (whole, windows))


def _dspark(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What a DSpark head has more, where it does not say otherwise: a Markov head of rank 256, and
    a confidence that reads the token before, too."""
    kind, rank = flat.get("markov_head_type") or "vanilla", flat.get("markov_rank", 256)
    if kind not in get_args(MarkovKind):
        raise ValueError(
            f"markov_head_type of the DSpark head is {kind!r}; served are "
            f"{', '.join(get_args(MarkovKind))}."
        )
    return {
        "markov_head_type": kind if rank else None,
        "markov_rank": rank,
        "confidence": flat.get("enable_confidence_head", True),
        "reads_previous": rank > 0 and flat.get("confidence_head_with_markov", True),
    }


def _dflash2(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The convolutions and the selector of a DFlash2 head, whose tables have the target's tokens.
    Raises ValueError."""
    group = flat.get("conv_group_size") or 16
    if flat["hidden_size"] % group:
        raise ValueError(
            f"hidden_size of the DFlash2 head is {flat['hidden_size']}; it must be a multiple of "
            f"conv_group_size, which is {group}."
        )
    if flat.get("draft_vocab_size") not in (None, flat["vocab_size"]):
        raise ValueError(
            f"draft_vocab_size of the DFlash2 head is {flat['draft_vocab_size']}; served is "
            f"vocab_size, {flat['vocab_size']}."
        )
    selector = flat.get("selector_rank") or 256, flat.get("selector_top_k") or 16
    return {"conv": (flat.get("conv_kernel_size") or 2, group), "selector": selector}


_FURTHER = {"DSpark": _dspark, "DFlash2": _dflash2}


_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."} | {
    f"candidate_selector.{name}_codebook": f"candidate_selector.{name}_codebook.weight"
    for name in ("predecessor", "successor")
}
_UNUSED = ("rotary_emb.inv_freq",)


class BlockConv(Module):
    """Sums each channel over the last rows of a block, before and after a part of a layer. Every
    row has weights of its own: a table's, and what a projection of the part's normed input adds for
    each group of channels."""

    def __init__(self, size: int, conv: tuple[int, int], placement: Placement) -> None:
        """conv: rows that are summed, and channels of a group."""
        super().__init__()
        taps, group = conv
        self.base_kernel = placement.parameter(2, taps, size)
        num_added = 2 * taps * size // group
        self.kernel_projection = Linear(size, num_added, bias=False, placement=placement)

    def weights(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[T, taps, H]` before and after the part, of its normed input `[T, H]`."""
        _, taps, size = self.base_kernel.shape
        added = self.kernel_projection.forward(normed).view(len(normed), 2, taps, -1, 1)
        own = self.base_kernel.view(2, taps, added.shape[3], -1)
        return (own + added).view(len(normed), 2, taps, size).unbind(1)


def _convolved(rows: torch.Tensor, weights: torch.Tensor, width: int) -> torch.Tensor:
    """rows `[T, H]` of blocks of `width` rows; weights `[T, taps, H]`."""
    blocks, total = rows.view(-1, width, rows.shape[1]), weights[:, 0] * rows
    for tap in range(1, min(weights.shape[1], width)):
        total += weights[:, tap] * F.pad(blocks[:, :-tap], (0, 0, tap, 0)).view_as(rows)
    return total


class ConvLayer(DecoderLayer):
    """A layer whose attention and MLP are between convolutions."""

    input_layernorm: RMSNorm
    mlp: MLP

    def __init__(self, config: DFlashConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert config.conv is not None
        self.attention_conv = BlockConv(config.hidden_size, config.conv, placement)
        self.mlp_conv = BlockConv(config.hidden_size, config.conv, placement)

    def fill_in(
        self, total: torch.Tensor, rotary: Rotary, context: ForwardContext, width: int
    ) -> torch.Tensor:
        """The residual stream `[T, H]` of blocks of `width` rows after the layer."""

        def attend(rows: torch.Tensor) -> torch.Tensor:
            attended = self.self_attn.forward(rows, None, rotary, context)
            return self.self_attn.o_proj.summed(attended)

        for norm, conv, part in (
            (self.input_layernorm, self.attention_conv, attend),
            (
                self.post_attention_layernorm,
                self.mlp_conv,
                lambda rows: self.mlp.forward(rows, None),
            ),
        ):
            normed = norm.forward(total)
            before, after = conv.weights(normed)
            total = total + _convolved(part(_convolved(normed, before, width)), after, width)
        return total


class DFlashHead(DraftHead):
    """Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

    config: DFlashConfig

    def __init__(
        self,
        config: DFlashConfig,
        target: CausalLM,
        num_captured: int,
        max_positions: int,
        placement: Placement,
        owns: Collection[str],
    ) -> None:
        """owns: `EMBEDDING` and `OUTPUT`, if they are not the target's."""
        super().__init__()
        self.config = config
        size, eps, is_tied = config.hidden_size, config.rms_norm_eps, config.tie_word_embeddings
        self.fc = Linear(
            num_captured * config.target_hidden_size, size, bias=False, placement=placement
        )
        self.hidden_norm = RMSNorm(size, eps, placement)
        kind = DecoderLayer if config.conv is None else ConvLayer
        self.layers = nn.ModuleList(
            kind(config, layer, placement) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps, placement)
        ends = target, owns, max_positions, placement
        self._add_ends(*ends, rows=config.output_size, is_tied=is_tied)
        assert config.mask_token is not None
        self.masks, self.block = Masks(config.mask_token), config.block
        self._add_correction(config, placement)

    def _add_correction(self, config: DFlashConfig, placement: Placement) -> None:
        size, markov = config.hidden_size, None
        if config.selector is not None:
            rank, topk = config.selector
            sizes = config.vocab_size, size, rank
            selector = CandidateSelector(topk, sizes, config.output_size, placement)
            self.add_under("candidate_selector", "correction", selector)
        if config.markov_head_type is not None:
            sizes = config.vocab_size, size, config.markov_rank
            markov = MarkovHead(config.markov_head_type, sizes, config.output_size, placement)
            self.add_under("markov_head", "correction", markov)
        if config.confidence:
            tokens = markov.markov_w1 if markov is not None and config.reads_previous else None
            self.add_under("confidence_head", "confidence", Confidence(size, tokens, placement))

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm.forward(self.fc.forward(captured, None))

    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        """Step 0 writes the keys and values of the text, from the fused states `hidden`. Step W
        fills in blocks of W rows, whose ids and positions are those of the newest token and of mask
        tokens, and returns states after the final norm. An entry depends on nothing after its own
        position; it is read and reused as an EAGLE head's."""
        input_ids, positions, hidden = rows
        rotary = Rotary(self.cos_sin, positions)
        if not step:
            for layer in self.layers:
                assert isinstance(layer, DecoderLayer)
                layer.self_attn.write(hidden, None, rotary, context)
            return hidden[:0]
        total = self.embedding.forward(input_ids)
        if self.config.conv is not None:
            for layer in self.layers:
                assert isinstance(layer, ConvLayer)
                total = layer.fill_in(total, rotary, context, step)
            assert context.wanted is not None
            return self.norm.forward(gather_rows(total, context.wanted))
        *earlier, last = self.layers
        for layer in earlier:
            total = layer.forward(total, rotary, context)
        wanted: torch.Tensor = last.forward(total, rotary, context, context.wanted)
        return self.norm.forward(wanted)


def load_dflash_head(source: HeadSource, config: DFlashConfig, num_captured: int) -> DFlashHead:
    """config: of the head in the folder. num_captured: how many layers of the target are captured
    for `fuse`. Raises ValueError if the checkpoint does not fit the config or the target."""
    config = config.for_target(source.target.config, num_captured).within(source.max_positions)
    return fill_head(DFlashHead, config, source, num_captured, _UNUSED, _RENAMED)
