"""Llama 4's text model: layers with and without a rotary embedding, unweighted q/k norm, scaled
queries, and experts in some layers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import HeadNorm, Placement, RMSNorm, StoredWeight, WeightSlot
from tllm_spec.models.linear import ColumnLinear
from tllm_spec.models.llama import MLP, Attention, DecoderLayer, LlamaForCausalLM, LlamaModel
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import LLAMA4_NAMES


@dataclass(frozen=True)
class InterleavedSlot(WeightSlot):
    """Rows of heads whose rotary pairs are adjacent in the checkpoint; here a head has the first
    members of all pairs, then the second ones."""

    head_dim: int = 0

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert isinstance(tensor, torch.Tensor)  # in FP8 Llama 4 is refused
        pairs = tensor.unflatten(0, (-1, self.head_dim // 2, 2))  # type: ignore[no-untyped-call] # torch's
        super().load(pairs.transpose(1, 2).flatten(0, 2))


class InterleavedQKV(ColumnLinear):
    """`Llama4Attention` sets `head_dim`."""

    head_dim: int

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            if ".v_proj." in name:
                yield name, slot
            else:
                yield name, InterleavedSlot(**vars(slot), head_dim=self.head_dim)


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
    """`[N, 1, 1]` float32: of the positions from n * floor_scale - 1 on. None: all are 1."""
    floor_scale: int

    @functools.cached_property
    def unrotated(self) -> Rotary:
        return Rotary(self.unrotated_table, torch.zeros_like(self.positions))

    @functools.cached_property
    def query_scales(self) -> torch.Tensor | None:
        """Factors of the queries in layers without a rotary embedding, `[T, 1, 1]` float32."""
        if self.temperatures is None:
            return None
        return self.temperatures[(self.positions + 1) // self.floor_scale]


class Llama4Attention(Attention):
    """Attention with a rotary embedding and then the q/k norm, or with neither and scaled
    queries."""

    projection = InterleavedQKV

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(replace(config, qk_norm=False), layer, placement)
        assert config.llama4 is not None and isinstance(self.qkv_proj, InterleavedQKV)
        self.qkv_proj.head_dim = config.head_dim
        self.is_rotated = layer not in config.llama4.nope_layers
        if config.qk_norm and self.is_rotated:
            self.qk_norm = UnweightedHeadNorm(self, config.rms_norm_eps, placement)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        assert isinstance(rotary, Llama4Rotary)
        if self.is_rotated:
            return super().forward(hidden, norm, rotary, context)
        heads, _ = self._heads(hidden, norm)
        if rotary.query_scales is not None:
            heads[:, : self.num_heads].mul_(rotary.query_scales)
        own = context.groups[self.group]
        return own.heads_backend.run(self.layer, heads, rotary.unrotated, own.plan)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        assert isinstance(rotary, Llama4Rotary)
        super().write(hidden, norm, rotary if self.is_rotated else rotary.unrotated, context)


class Llama4Layer(DecoderLayer):
    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = Llama4Attention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        assert config.moe is not None
        if layer in config.sparse_layers:
            mlp: SparseMoE | MLP = SparseMoE(config.moe, placement, LLAMA4_NAMES)
        else:
            mlp = MLP(config, placement)
        self.add_under("feed_forward", "mlp", mlp)


class Llama4Model(LlamaModel):
    """The decoder, with the tables that layers without a rotary embedding read."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        placement: Placement,
        layer_type: type[DecoderLayer],
    ) -> None:
        super().__init__(config, max_positions, placement, layer_type)
        assert config.llama4 is not None
        shape, device = (1, 2, 1, config.head_dim), placement.device
        self.unrotated = torch.zeros(shape, dtype=placement.dtype, device=device)
        self.unrotated[:, 0] = 1.0
        self.temperature = config.llama4.temperature
        self.temperatures = (
            None if self.temperature is None else self.temperature.table(max_positions).to(device)
        )

    def rotary(self, positions: torch.Tensor) -> Llama4Rotary:
        return Llama4Rotary(
            self.cos_sin,
            positions,
            unrotated_table=self.unrotated,
            temperatures=self.temperatures,
            floor_scale=self.temperature.floor_scale if self.temperature else 1,
        )


class Llama4ForCausalLM(LlamaForCausalLM):
    model_type = Llama4Model
    layer_type = Llama4Layer
