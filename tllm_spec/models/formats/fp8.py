"""FP8 weights with float32 scales for each row and each 128 inputs, next to activations of the
model's type (W8A16, kernels/gemm/scaled_linear.py), or that are quantised, too (W8A8,
kernels/gemm/fp8_numbers.py and kernels/gemm/fp8_linear.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.fp8_gemms import Fp8Gemms, tile_scales
from tllm_spec.kernels.gemm.fp8_linear import NUM_COUNTERS, fp8_linear, fp8_swiglu
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK, FUSED_ROWS, dequantised, quantise_rows
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.gemm.scaled_linear import scaled_linear
from tllm_spec.models.formats.weight_format import FewRowsFormat, Part, Rows, WeightFormat
from tllm_spec.models.layers import Placement, RMSNorm, StoredWeight, WeightSlot, tp_sizes

# FP8 weights with float32 scales for each row and each 128 inputs, and activations of the model's
# dtype (W8A16): kernels/gemm/scaled_linear.py.


FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Tensor:
    """A checkpoint's weight `[N, K]` in FP8, with its scales `[N, ceil(K / 128)]`; or those of all
    experts, `[E, N, K]`."""

    weight: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None
    """`[]` float32: the static scale of its activations, if they have one."""

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def __getitem__(self, index: int | slice) -> "Fp8Tensor":
        return Fp8Tensor(self.weight[index], self.scales[index], self.input_scale)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantised(self.weight, self.scales, dtype)


@dataclass(frozen=True)
class ScaledSlot(WeightSlot):
    """Also where the scales of an FP8 tensor go, `[N, ceil(K / 128)]` of this rank, or if all of a
    row are equal `[N, 1]`; and the static scale of activations, of which fused parts share the
    largest."""

    dtypes, is_quantised = (), True
    scales: torch.Tensor | None = None
    """None: as `destination`."""
    input_scale: torch.Tensor | None = None
    module: str = ""
    """In the checkpoint, for errors."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert isinstance(tensor, Fp8Tensor)  # other layers have been made plain
        if self.destination is not None and self.scales is not None:
            self.destination.copy_(self.own(tensor.weight))
            self.scales.copy_(self.own(tensor.scales, BLOCK)[:, : self.scales.shape[1]])
        if self.input_scale is None:
            return
        if tensor.input_scale is None:
            raise ValueError(
                f"{self.module} has no input_scale, the static scale of its activations; "
                "fp8_activations: false serves the checkpoint without."
            )
        self.input_scale.clamp_min_(tensor.input_scale.item())


class ScaledWeight(FewRowsFormat):
    """An FP8 weight. More than 256 rows are multiplied by the weight that was dequantised to 16
    bits just before, so the order of sums depends on the number of rows, unless the placement is
    batch-invariant. `dtype`: of the numbers without their scales."""

    scales: nn.Parameter
    input_scale: nn.Parameter | None = None
    """float32, the static scale of activations: `[]`, or `[E]` where each expert has its own."""

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        bias: nn.Parameter | None,
        dtype: torch.dtype = FP8,
    ) -> None:
        device = placement.memory
        sizes = *shape[:-1], -(-shape[-1] // BLOCK)
        weight = torch.empty(shape, dtype=dtype, device=device)
        scales = torch.empty(sizes, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias, self.dtype = bias, placement.dtype
        self.is_invariant = placement.batch_invariant

    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        """The checkpoint's scales come with the weight, as an `Fp8Tensor`."""
        own, scales = (None, None) if rows is None else (self.weight[rows], self.scales[rows])
        input_scale: torch.Tensor | None = self.input_scale
        if input_scale is not None and input_scale.ndim:
            input_scale = input_scale[rows[0]] if isinstance(rows, tuple) else None
        place = own, part.shape, part.shard_dim, part.start, part.order
        return ScaledSlot(*place, scales, input_scale, module)

    def full_weight(self) -> torch.Tensor:
        return dequantised(self.weight, self.scales, self.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._rows(x)

    def add_rows_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._rows(x, total)

    def _rows(self, x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        own = self.weight, self.scales, self.bias
        return scaled_linear(x, *own, group=self.group, add_to=total, invariant=self.is_invariant)


class QuantisedActivations(ScaledWeight):
    """Norm and SwiGLU are fused with the quantisation. The reference multiplies codes in float64,
    so CPUs keep the weight's codes in that type."""

    gemms: Fp8Gemms | None = None
    """None: all rows run the kernel, which is batch-invariant."""
    tiles: torch.Tensor | None = None

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        bias: nn.Parameter | None,
        *,
        has_own_inputs: bool = False,
    ) -> None:
        """has_own_inputs: whether each expert has inputs, and so a static scale, of its own."""
        on_kernels = placement.device.type != "cpu" or has_kernels(placement.device)
        dtype = FP8 if on_kernels else torch.float64
        super().__init__(shape, placement, bias, dtype)
        *number, out_features, in_features = shape
        columns = 1 if placement.quantised.fp8 in ("tensor", "row") else self.scales.shape[-1]
        # In memory `[..., columns, N]`, as the kernels read it.
        scales = torch.empty(*number, columns, out_features, device=placement.memory).mT
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=placement.memory)
        assert placement.quantised.activations is not None
        self.activations, self.communicator = placement.quantised.activations, None
        if self.activations.shared_by == "tensor":
            sizes = number if has_own_inputs else ()
            zeros = torch.zeros(sizes, dtype=torch.float32, device=placement.memory)
            self.input_scale = nn.Parameter(zeros, requires_grad=False)
        elif placement.input_slices > 1 and self.activations.shared_by == "token":
            self.communicator = placement.communicator
        elif placement.input_slices > 1:
            key = "moe_tensor_parallel_size" if number else "tensor_parallel_size"
            check_blocks(in_features, placement.input_slices, key)

    def full_weight(self) -> torch.Tensor:
        columns = -(-self.weight.shape[1] // BLOCK)
        return dequantised(self.weight, self.scales.expand(-1, columns), self.dtype)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().parameters()
        if self.input_scale is not None:
            yield "input_scale", self.input_scale

    def use_library(self, gemms: Fp8Gemms) -> None:
        """Called after loading: many rows run the library, whose order of sums depends on their
        number."""
        self.gemms = gemms
        self.tiles = tile_scales(self.scales) if self.scales.shape[1] > 1 else None

    def renew_tiles(self) -> None:
        """Called after other weights were written in place."""
        if self.tiles is not None:
            tiles = tile_scales(self.scales)
            assert tiles is not None, "rows of a tile have different scales"
            self.tiles.copy_(tiles)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def fuses_norm(self, x: torch.Tensor) -> bool:
        return True

    def fuses_adapters(self, x: torch.Tensor) -> bool:
        """No: its GEMM multiplies codes of activations."""
        return False

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return self._product(*self.quantised(x, norm))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        if len(x) <= FUSED_ROWS and not gates:
            return self._activated(x, norm)[0]
        return silu_and_mul(self.forward(x, norm), **gates)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None = None) -> None:
        self._product(*self.quantised(x, norm), out, adds=False)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._product(*self.quantised(x), total)

    def add_gated_to(
        self, total: torch.Tensor, gate_up: WeightFormat, x: torch.Tensor, norm: RMSNorm | None
    ) -> None:
        if len(x) <= FUSED_ROWS and isinstance(gate_up, QuantisedActivations):
            activated, magnitudes = gate_up._activated(x, norm)
            quantised = self.quantised(activated, magnitudes=magnitudes)
        else:
            quantised = self.quantised(gate_up.forward(x, norm), gated=True)
        self._product(*quantised, total)

    def _activated(
        self, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `fp8_swiglu`."""
        operands = *self.quantised(x, norm), self.weight, self.scales
        return fp8_swiglu(*operands, self.dtype, self.bias, counters=self.counters)

    def _product(
        self,
        codes: torch.Tensor,
        code_scales: torch.Tensor,
        output: torch.Tensor | None = None,
        *,
        adds: bool = True,
    ) -> torch.Tensor:
        """adds: whether the product is added to the output, if there is one, or written."""
        operands = codes, code_scales, self.weight, self.scales
        if output is None:
            output = self.weight.new_empty(len(codes), len(self.weight), dtype=self.dtype)
            adds = False
        given = *operands, self.tiles, self.bias, output
        if self.gemms is not None and self.gemms.run(*given, adds=adds):
            return output
        counters = self.counters if len(codes) <= FUSED_ROWS else None
        target = {"add_to" if adds else "out": output}
        return fp8_linear(*operands, self.dtype, self.bias, **target, counters=counters)

    def quantised(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        *,
        gated: bool = False,
        magnitudes: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales. magnitudes: the largest of each row's parts, `[T, parts]`, where they
        are known. Ranks with slices of the inputs share the largest magnitude. experts: of each
        row, where each has a static scale of its own."""
        scale, in_blocks = self.input_scale, self.activations.shared_by == "block"
        if self.communicator is not None:
            own = x.abs().amax(1, keepdim=True).float()
            magnitudes = self.communicator.all_gather(own)
        return quantise_rows(
            x,
            None if norm is None else norm.kernel_weight,
            gated=gated,
            in_blocks=in_blocks,
            scale=scale if scale is None or experts is None else scale[experts],
            magnitudes=None if in_blocks else magnitudes,
            bound=self.activations.bound,
        )


def check_blocks(in_features: int, number: int, key: str) -> None:
    """Raises ValueError if a rank's slice of the inputs, one of `number`, is not whole blocks. key:
    the option that says the number."""
    if in_features % BLOCK:
        raise ValueError(
            f"{key} is {number}; a layer has {in_features * number} inputs, of which {BLOCK} share "
            "a scale of activations, and a device needs whole blocks: with "
            f"{tp_sizes(in_features * number, BLOCK)} it has. With fp8_activations: false any size "
            "is served."
        )
