"""Gemma 3's text model: norms before and after attention and MLP, GeGLU, scaled embeddings, and two
rotary embeddings, of layers with a sliding window and of those that see all keys."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.gemm.norms import Activation
from tllm_spec.models.config import FULL, SLIDING, ModelConfig, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import MLP, CausalLM, DecoderLayer, DecoderModel, layer_norm
from tllm_spec.models.rotary import cos_sin_table, rope_config

ACTIVATION: Activation = "gelu_pytorch_tanh"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
# What transformers' model does not compute, or what is not served.
_OFF = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def read_gemma3(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for what is not served."""
    flat = with_defaults(raw, _DEFAULTS)
    for key in _OFF:
        if flat.get(key):
            raise ValueError(f"{key} is {flat[key]}; Gemma 3 is served without it.")
    if (activation := flat["hidden_activation"]) != ACTIVATION:
        raise ValueError(f"hidden_activation is {activation!r}; only {ACTIVATION!r} is served.")
    if not flat.get("layer_types"):
        period = flat.get("sliding_window_pattern") or flat.get("_sliding_window_pattern") or 6
        numbers = range(1, required(flat, "num_hidden_layers") + 1)
        flat["layer_types"] = [SLIDING if number % period else FULL for number in numbers]
    local = {"rope_parameters": _rope_parameters(flat, SLIDING, "rope_local_base_freq")}
    scaling, rope = flat.pop("rope_scaling", None) or {}, _rope_parameters(flat, FULL, "rope_theta")
    flat |= {"rope_parameters": rope | scaling, "hidden_act": "silu", "use_sliding_window": None}
    types = enumerate(flat["layer_types"])
    return replace(
        decoder_config(flat, reads_bias=True),
        hidden_act=activation,
        qk_norm=True,
        offset_norms=True,
        query_scale=float(flat["query_pre_attn_scalar"]) ** -0.5,
        local_layers=frozenset(layer for layer, kind in types if kind == SLIDING),
        local_rope=rope_config(flat | local),
    )


def _rope_parameters(flat: Mapping[str, Any], kind: str, theta: str) -> dict[str, Any]:
    """The parameters of a kind of layers, in transformers' newer spelling."""
    fields = (flat.get("rope_parameters") or {}).get(kind) or {}
    return {"rope_type": "default", "rope_theta": flat[theta]} | fields


@dataclass(frozen=True, kw_only=True)
class Gemma3Rotary(Rotary):
    """The rotary embedding of layers that see all keys."""

    local: Rotary
    """The rotary embedding of layers with a sliding window."""


class Gemma3Layer(DecoderLayer):
    mlp: MLP

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self.is_local = layer in config.local_layers
        self.pre_feedforward_layernorm = layer_norm(config, placement)
        self.post_feedforward_layernorm = layer_norm(config, placement)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(rotary, Gemma3Rotary)
        return super().forward(hidden, rotary.local if self.is_local else rotary, context, wanted)

    def add_branches(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """The norms after attention and MLP act on what they add."""
        normed = self._attended(hidden, attended)
        self.post_feedforward_layernorm.add_to(hidden, self.mlp.forward(normed, None))

    def _attended(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds what attention puts out to hidden `[R, H]` in place. Returns the MLP's input."""
        output, then = self.self_attn.o_proj.summed(attended), self.pre_feedforward_layernorm
        return self.post_attention_layernorm.add_to(hidden, output, then=then)


class Gemma3Model(DecoderModel):
    """The decoder, with a rotary table for layers with a window, too. Draft heads read the
    embedding unscaled."""

    def add_tables(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        super().add_tables(config, max_positions, placement)
        assert config.local_rope is not None
        self.local_cos_sin = cos_sin_table(
            config.local_rope, config.head_dim, max_positions, placement
        )
        # In transformers the factor is a tensor of the weights' dtype.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype).item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids).mul_(self.embedding_scale)

    def rotary(self, positions: torch.Tensor) -> Gemma3Rotary:
        local = Rotary(self.local_cos_sin, positions)
        return Gemma3Rotary(self.cos_sin, positions, local=local)


class Gemma3ForCausalLM(CausalLM):
    model_type = Gemma3Model
    layer_type = Gemma3Layer
