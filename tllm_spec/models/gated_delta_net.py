"""The gated delta net (arXiv 2412.06464): linear attention with a recurrent state, whose inputs go
through a short causal convolution."""

from collections.abc import Iterator

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.states.gated_delta import DeltaWeights, gated_norm
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import RMSNorm, in_float32
from tllm_spec.models.linear import Linear, RowLinear
from tllm_spec.models.module import Module, Placement, WeightSlot, sibling
from tllm_spec.models.qwen3_next_config import DeltaConfig


class _Heads:
    """Which of the checkpoint's rows this rank has: those of neighbouring key heads, and of the
    value heads that belong to them. `shape`: of the rank; `full`: of all ranks."""

    def __init__(self, delta: DeltaConfig, placement: Placement) -> None:
        self.full, self.shape = delta.heads, delta.shape(placement.mapping)
        self.rank, self.is_split = placement.mapping.tp_rank, delta.is_split

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rank's part of the rows `[N, ...]` of all heads."""
        return rows.chunk(self.full.num_key_heads // self.shape.num_key_heads)[self.rank]

    def grouped(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Rows of a tensor that has, for each key head, parts of these sizes one after another: the
        rank's, with the first part of all heads first."""
        rows = torch.arange(self.full.num_key_heads * sum(sizes)).view(-1, sum(sizes))
        return torch.cat([part.flatten() for part in self.own(rows).split_with_sizes(sizes, 1)])

    def segments(self) -> torch.Tensor:
        """Rows of a tensor that has q of all heads, then k and v: the rank's."""
        keys = self.full.num_key_heads * self.full.key_dim
        sizes = keys, keys, self.full.num_value_heads * self.full.value_dim
        parts = torch.arange(self.full.num_channels).split_with_sizes(sizes)
        return torch.cat([self.own(part) for part in parts])


class DeltaProjection(Linear):
    """One GEMM for both projections of the checkpoint, with outputs as `gated_delta` reads them."""

    def __init__(self, hidden_size: int, heads: _Heads, placement: Placement) -> None:
        super().__init__(hidden_size, heads.shape.num_projected, bias=False, placement=placement)
        self.heads, self.hidden_size = heads, hidden_size

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        if self.heads.is_split:
            yield from self._split_slots(path)
            return
        full, num_gates = self.heads.full, 2 * self.heads.shape.num_value_heads
        each = full.num_value_heads // full.num_key_heads
        parts = {
            "in_proj_ba": (self.weight[:num_gates], (each, each)),
            "in_proj_qkvz": (
                self.weight[num_gates:],
                (full.key_dim, full.key_dim, each * full.value_dim, each * full.value_dim),
            ),
        }
        for name, (rows, sizes) in parts.items():
            shape = full.num_key_heads * sum(sizes), self.hidden_size
            order = self.heads.grouped(sizes)
            yield f"{sibling(path, name)}.weight", WeightSlot(rows, shape, order=order)

    def _split_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        heads, full = self.heads, self.heads.full
        own, number = heads.shape, full.num_value_heads
        orders = {
            "in_proj_b": heads.own(torch.arange(number)),
            "in_proj_a": heads.own(torch.arange(number)),
            "in_proj_qkv": heads.segments(),
            "in_proj_z": heads.own(torch.arange(number * full.value_dim)),
        }
        sizes = number, number, full.num_channels, number * full.value_dim
        parts = self.weight.split_with_sizes([len(order) for order in orders.values()])
        assert len(self.weight) == own.num_projected
        for (name, order), size, rows in zip(orders.items(), sizes, parts, strict=True):
            slot = WeightSlot(rows, (size, self.hidden_size), order=order)
            yield f"{sibling(path, name)}.weight", slot


class DeltaConv(Module):
    """The weight of the causal convolution, `[C, K]`."""

    def __init__(self, heads: _Heads, placement: Placement) -> None:
        super().__init__()
        self.heads = heads
        self.weight = placement.parameter(heads.shape.num_channels, heads.shape.kernel_size)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = self.heads.full
        shape = full.num_channels, 1, full.kernel_size
        order = self.heads.segments()
        yield f"{path}.weight", WeightSlot(self.weight.unsqueeze(1), shape, order=order)


class GatedDeltaNet(Module):
    """A layer's projections, convolution, recurrence and norm. The layer applies the output
    projection, `o_proj`, since it adds to the residual stream."""

    o_proj: RowLinear

    def __init__(
        self, config: ModelConfig, delta: DeltaConfig, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        self.layer, self.heads = delta.layers.index(layer), _Heads(delta, placement)
        self.shape, wide = self.heads.shape, in_float32(placement)
        self.in_proj = DeltaProjection(config.hidden_size, self.heads, placement)
        self.conv1d = DeltaConv(self.heads, placement)
        self.A_log = wide.parameter(self.shape.num_value_heads)
        self.dt_bias = wide.parameter(self.shape.num_value_heads)
        self.weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        self.norm = RMSNorm(self.shape.value_dim, config.rms_norm_eps, placement)
        size = delta.heads.num_value_heads * delta.heads.value_dim
        out_proj = RowLinear(size, config.hidden_size, bias=False, placement=placement)
        self.add_under("out_proj", "o_proj", out_proj)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, Hv * Dv]`, for hidden `[T, H]`. `norm` is applied to hidden
        first."""
        projected = self.in_proj.forward(hidden, norm)
        assert context.recurrent is not None
        answers = context.recurrent.run(self.layer, projected, self.weights)
        gates = projected[:, self.shape.num_inputs :]
        return gated_norm(answers, gates, self.norm.weight, self.norm.eps)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, for rows whose outputs are not needed."""
        assert context.recurrent is not None
        context.recurrent.run(self.layer, self.in_proj.forward(hidden, norm), self.weights)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = (self.heads.full.num_value_heads,)
        start = self.shape.num_value_heads * self.heads.rank
        for name, values in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield f"{path}.{name}", WeightSlot(values, full, 0, start)
