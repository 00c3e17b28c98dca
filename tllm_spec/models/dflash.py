"""The DFlash draft head: a few decoder layers that fill in a block of mask tokens at once.

Every layer's keys and values of the text are made of the target's hidden states, once for each
token (step 0 of `forward`). The block is the newest token, which the target has not read yet, and
mask tokens; its rows see the text and the whole block. The row at a position drafts the token at
that position. Requests, pages and the drafting loop are not known here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config_file import read_config
from tllm_spec.models.draft_head import DraftHead, HeadSource, Masks
from tllm_spec.models.draft_kind import HeadKind
from tllm_spec.models.eagle3 import fill_head
from tllm_spec.models.eagle3_config import DECODER_KEYS, Eagle3Config, check_head, unknown_keys
from tllm_spec.models.layers import Placement, RMSNorm
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.registry import model_config_of

# The shape of a DFlash head, read from its `config.json`.
#
# Two spellings are in use: a flat Qwen3 or Llama config that nests some keys under `dflash_config`
# (z-lab), and the speculators format (vllm-project/speculators), which nests the layers' keys
# under `transformer_layer_config`. Layers of the target are counted by their outputs in the first,
# and by the states that enter them in the second.


_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}  # by model_type
_OTHER_METHODS = ("DFlash2", "Domino", "DSpark")  # whose heads have the same keys and more
# Variants that are not implemented, each with the value that means that the head is without it.
_SERVED: Mapping[str, Any] = {
    "is_causal": False,
    "causal": False,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_gemma_norm": False,
    "is_neox_style": True,
    "output_multiplier": 1,
    "input_embedding_scale": 1,
}
_READ = DECODER_KEYS | {
    *("block_size", "mask_token_id", "target_layer_ids", "draft_vocab_size", "target_hidden_size"),
    *("num_target_layers", "swa_window_size", "mask_token"),
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(Eagle3Config):
    """`block_size`: the newest token and the mask tokens after it, at most."""

    kind: ClassVar[HeadKind] = "DFlash"
    block_size: int

    @classmethod
    def from_pretrained(cls, path: Path) -> "DFlashConfig":
        """Read `path/config.json`.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        if (path / "mask_embedding.pt").exists():
            raise ValueError(f"{path / 'mask_embedding.pt'}: mask embeddings are not served.")
        flat = _flat(read_config(path))
        config = cls(
            **vars(model_config_of(flat)) | {"unknown_keys": flat["unknown_keys"]},
            draft_vocab_size=flat.get("draft_vocab_size"),
            target_hidden_size=int(flat.get("target_hidden_size") or flat["hidden_size"]),
            capture_layers=flat["capture_layers"],
            mask_token=flat.get("mask_token_id"),
            block_size=int(flat.get("block_size") or 16),
        )
        check_head(config)
        if config.sliding_window is not None:
            raise ValueError(
                f"sliding_window of the DFlash head is {config.sliding_window}; heads whose layers "
                "attend to all tokens are served."
            )
        return config

    def windowed(self, size: int | None) -> "DFlashConfig":
        """Raises ValueError."""
        raise ValueError("a DFlash head attends to all tokens")

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose outputs a head reads that does not name them: one for each of
        its own, evenly spread."""
        number = self.num_layers
        if number == 1:
            return (num_target_layers // 2,)
        last = num_target_layers - 4
        return tuple(round(1 + index * last / (number - 1)) for index in range(number))


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys on one level, with the layers as `capture_layers`."""
    layer: dict[str, Any] = raw.get("transformer_layer_config") or {}
    nested: dict[str, Any] = raw.get("dflash_config") or {}
    outer = {
        key: value
        for key, value in raw.items()
        if key not in ("transformer_layer_config", "dflash_config")
    }
    flat = layer | outer | nested
    entering = flat.pop("aux_hidden_state_layer_ids", None)
    named = [*(raw.get("architectures") or ()), flat.get("projector_type")]
    for method in _OTHER_METHODS:
        if any(method.lower() in str(name).lower() for name in named):
            raise ValueError(f"The draft weights are a {method} head; served are DFlash heads.")
    kind = flat.get("speculators_model_type") or "dflash"
    if kind != "dflash":
        raise ValueError(f"speculators_model_type is {kind!r}; served is 'dflash'.")
    model_type = layer.get("model_type") or raw.get("model_type", "qwen3")
    if model_type not in _ARCHITECTURES:
        raise ValueError(
            f"model_type of the DFlash head is {model_type!r}; served are "
            f"{', '.join(_ARCHITECTURES)}."
        )
    flat["architectures"] = [_ARCHITECTURES[model_type]]
    flat.setdefault("tie_word_embeddings", False)
    unknown = unknown_keys(flat, _READ, _SERVED, "DFlash")
    layers = flat.get("target_layer_ids") or [each - 1 for each in entering or ()]
    return flat | {"capture_layers": tuple(layers) or None, "unknown_keys": unknown}


_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_UNUSED = ("rotary_emb.inv_freq",)


class DFlashHead(DraftHead):
    """Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

    config: DFlashConfig
    fills_in = True

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
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps, placement)
        ends = target, owns, max_positions, placement
        self._add_ends(*ends, rows=config.output_size, is_tied=is_tied)
        assert config.mask_token is not None
        self.masks = Masks(config.mask_token)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm.forward(self.fc.forward(captured, None))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        context: ForwardContext,
        step: int = 0,
    ) -> torch.Tensor:
        """Step 0 writes the keys and values of the text, from the fused states `hidden`. Step 1
        fills in a block, of which ids and positions are those of the newest token and of mask
        tokens. An entry depends on nothing after its own position; it is read and reused as an
        EAGLE head's."""
        rotary = Rotary(self.cos_sin, positions)
        if not step:
            for layer in self.layers:
                assert isinstance(layer, DecoderLayer)
                layer.self_attn.write(hidden, None, rotary, context)
            return hidden[:0]
        total = self.embedding.forward(input_ids)
        *earlier, last = self.layers
        for layer in earlier:
            total = layer.forward(total, rotary, context)
        wanted: torch.Tensor = last.forward(total, rotary, context, context.wanted)
        return wanted

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output.forward(hidden, self.norm)


def load_dflash_head(source: HeadSource, config: DFlashConfig, num_captured: int) -> DFlashHead:
    """config: of the head in the folder. num_captured: how many layers of the target are captured
    for `fuse`. Raises ValueError if the checkpoint does not fit the config or the target."""
    config = config.for_target(source.target.config, num_captured)
    return fill_head(DFlashHead, config, source, num_captured, _UNUSED, _RENAMED)
