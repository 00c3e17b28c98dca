"""Llama 4's text model: layers with and without a rotary embedding, unweighted q/k norm, scaled
queries, and experts in some layers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, Temperature, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.layers import HeadNorm, Placement, RMSNorm, WeightSlot
from tllm_spec.models.llama import Attention, CausalLM, DecoderLayer, DecoderModel
from tllm_spec.models.moe_config import MoENames, moe_config
from tllm_spec.models.rotary import rope_config

_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
LLAMA4_NAMES = MoENames("feed_forward", router="router", inputs_first=True)


def read_llama4(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for layer types that do not follow from the rotary layers."""
    flat = with_defaults(raw, _DEFAULTS)
    nope = _nope_layers(flat)
    expected = [
        "full_attention" if layer in nope else "chunked_attention"
        for layer in range(required(flat, "num_hidden_layers"))
    ]
    if (types := flat.pop("layer_types", None)) and types != expected:
        raise ValueError(
            f"layer_types is {types}; served is full_attention in the layers without a rotary "
            "embedding and chunked_attention in the others."
        )
    step, inner = int(flat["interleave_moe_layer_step"]), flat["intermediate_size"]
    sparse = flat.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, int(flat["num_hidden_layers"]), step)
    flat |= {"moe_intermediate_size": inner, "intermediate_size": flat["intermediate_size_mlp"]}
    chunk = flat["attention_chunk_size"]
    temperature = Temperature(int(flat["floor_scale"]), float(flat["attn_scale"]))
    return replace(
        decoder_config(flat, rope=replace(rope_config(flat), is_interleaved=True), reads_bias=True),
        qk_norm=bool(flat["use_qk_norm"]),
        moe=replace(
            moe_config(flat),
            shared_intermediate_size=int(inner),
            scoring="sigmoid",
            apply_weight_on_input=True,
            names=LLAMA4_NAMES,
        ),
        sparse_layers=frozenset(sparse),
        nope_layers=nope,
        chunk_size=None if chunk is None else int(chunk),
        temperature=temperature if flat["attn_temperature_tuning"] else None,
    )


def _nope_layers(flat: dict[str, Any]) -> frozenset[int]:
    """Layers without a rotary embedding: `no_rope_layers` has 0 for them, or every
    `no_rope_layer_interval`-th. Raises ValueError if it has not one for each layer."""
    number, interval = required(flat, "num_hidden_layers"), flat["no_rope_layer_interval"]
    flags = flat.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    if len(flags) != number:
        raise ValueError(f"no_rope_layers has {len(flags)} entries for {number} layers.")
    return frozenset(layer for layer in range(number) if not flags[layer])


class UnweightedHeadNorm(HeadNorm):
    """Weights of 1, which no checkpoint has. It precedes the rotation, which keeps a head's
    length."""

    def __init__(self, attention: Attention, eps: float, placement: Placement) -> None:
        super().__init__(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, eps, placement
        )
        self.weight.fill_(1.0)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Llama4Rotary(Rotary):
    """The rows of one forward in layers with and without a rotary embedding."""

    unrotated_table: torch.Tensor
    """`[1, 2, 1, D]`: a rotation by 0."""
    temperatures: torch.Tensor | None
    """`[N, 1, 1]` float32: of the positions from n * floor_scale - first on. None: all are 1."""
    temperature: Temperature | None

    @functools.cached_property
    def unrotated(self) -> Rotary:
        return Rotary(self.unrotated_table, torch.zeros_like(self.positions))

    @functools.cached_property
    def query_scales(self) -> torch.Tensor | None:
        """Factors of the queries that are scaled, `[T, 1, 1]` float32."""
        if self.temperature is None or self.temperatures is None:
            return None
        return self.temperatures[
            (self.positions + self.temperature.first) // self.temperature.floor_scale
        ]


class Llama4Attention(Attention):
    """Attention with a rotary embedding and then the q/k norm, or with neither and scaled
    queries. scales_all: queries with a rotary embedding are scaled, too."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, *, scales_all: bool = False
    ) -> None:
        super().__init__(replace(config, qk_norm=False), layer, placement)
        self.is_rotated = layer not in config.nope_layers
        self.is_scaled = scales_all or not self.is_rotated
        if config.qk_norm and self.is_rotated:
            self.qk_norm = UnweightedHeadNorm(self, config.rms_norm_eps, placement)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        assert isinstance(rotary, Llama4Rotary)
        if not self.is_scaled:
            return super().forward(hidden, norm, rotary, context)
        inputs = self._inputs(hidden, norm)
        if rotary.query_scales is not None:
            inputs.qkv[:, : self.num_heads].mul_(rotary.query_scales)
        backend, plan = context.groups[self.group]
        own = rotary if self.is_rotated else rotary.unrotated
        return backend.run(self.layer, inputs, own, plan)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        assert isinstance(rotary, Llama4Rotary)
        super().write(hidden, norm, rotary if self.is_rotated else rotary.unrotated, context)


class Llama4Layer(DecoderLayer):
    attention = Llama4Attention


class Llama4Model(DecoderModel):
    """The decoder, with the tables that layers without a rotary embedding read."""

    def add_tables(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        super().add_tables(config, max_positions, placement)
        shape, device = (1, 2, 1, config.head_dim), placement.memory
        self.unrotated = torch.zeros(shape, dtype=placement.dtype, device=device)
        self.unrotated[:, 0] = 1.0
        self.temperatures, self.temperature = None, config.temperature
        if (temperature := config.temperature) is not None:
            number = max_positions // temperature.floor_scale + 1
            floors = torch.arange(number, dtype=torch.float32)
            factors = torch.log1p(floors) * temperature.attn_scale + 1.0
            self.temperatures = factors.view(-1, 1, 1).to(device)

    def rotary(self, positions: torch.Tensor) -> Llama4Rotary:
        return Llama4Rotary(
            self.cos_sin,
            positions,
            unrotated_table=self.unrotated,
            temperatures=self.temperatures,
            temperature=self.temperature,
        )


class Llama4ForCausalLM(CausalLM):
    model_type = Llama4Model
    layer_type = Llama4Layer
