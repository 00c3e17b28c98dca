"""FP8 weights with float32 scales for each row and each 128 inputs, next to activations of the
model's type (W8A16, kernels/gemm/scaled_linear.py), or that are quantised, too (W8A8,
kernels/gemm/fp8_numbers.py and kernels/gemm/fp8_linear.py)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.fp8_linear import Fp8Gemms, fp8_linear, tile_scales
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK, dequantised, quantise_rows
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.gemm.scaled_linear import scaled_linear
from tllm_spec.models.formats.weight_format import FewRowsFormat, Part, WeightFormat
from tllm_spec.models.layers import Placement, RMSNorm, StoredWeight, WeightSlot, tp_sizes

# FP8 weights with float32 scales for each row and each 128 inputs, and activations of the model's
# dtype (W8A16): kernels/gemm/scaled_linear.py.


FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Tensor:
    """A checkpoint's weight `[N, K]` in FP8, with its scales `[N, ceil(K / 128)]`."""

    weight: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None
    """`[]` float32: the static scale of its activations, if they have one."""

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantised(self.weight, self.scales, dtype)


@dataclass(frozen=True)
class ScaledSlot(WeightSlot):
    """Also where the scales of an FP8 tensor go, `[N, ceil(K / 128)]` of this rank, or if all of a
    row are equal `[N, 1]`."""

    dtypes, is_quantised = (), True
    scales: torch.Tensor | None = None
    """None: as `destination`."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        if self.destination is None or self.scales is None:
            return
        assert isinstance(tensor, Fp8Tensor)  # other layers have been made plain
        self.destination.copy_(self.own(tensor.weight))
        self.scales.copy_(self.own(tensor.scales, BLOCK)[:, : self.scales.shape[1]])


def scaled_parameters(
    *shape: int, device: torch.device, dtype: torch.dtype = FP8
) -> tuple[nn.Parameter, nn.Parameter]:
    """A weight `[..., N, K]` and its scales `[..., N, ceil(K / 128)]`, uninitialised."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    sizes = *shape[:-1], -(-shape[-1] // BLOCK)
    scales = torch.empty(sizes, dtype=torch.float32, device=device)
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scales, requires_grad=False)


class ScaledWeight(FewRowsFormat):
    """An FP8 weight. More than 256 rows are multiplied by the weight that was dequantised to 16
    bits just before, so the order of sums depends on the number of rows, unless the placement is
    batch-invariant. `dtype`: of the numbers without their scales."""

    scales: nn.Parameter

    def __init__(
        self,
        out_features: int,
        in_features: int,
        placement: Placement,
        bias: nn.Parameter | None,
        dtype: torch.dtype = FP8,
    ) -> None:
        self.weight, self.scales = scaled_parameters(
            out_features, in_features, device=placement.device, dtype=dtype
        )
        self.bias, self.dtype = bias, placement.dtype
        self.is_invariant = placement.batch_invariant

    def slots(self, module: str, rows: slice, part: Part) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's scales come with the weight, as an `Fp8Tensor`."""
        own = self.weight[rows], part.shape, part.shard_dim, part.start, part.order
        yield f"{module}.weight", ScaledSlot(*own, scales=self.scales[rows])

    def full_weight(self) -> torch.Tensor:
        return dequantised(self.weight, self.scales, self.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._rows(x)

    def add_rows_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._rows(x, total)

    def _rows(self, x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        own = self.weight, self.scales, self.bias
        return scaled_linear(x, *own, group=self.group, add_to=total, invariant=self.is_invariant)


@dataclass(frozen=True)
class CodesSlot(ScaledSlot):
    """Also where the static scale of activations goes, of which fused parts share the largest."""

    input_scale: torch.Tensor | None = None
    module: str = ""
    """In the checkpoint, for errors."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        super().load(tensor)
        if self.input_scale is None:
            return
        assert isinstance(tensor, Fp8Tensor)
        if tensor.input_scale is None:
            raise ValueError(
                f"{self.module} has no input_scale, the static scale of its activations; "
                "fp8_activations: false serves the checkpoint without."
            )
        self.input_scale.clamp_min_(tensor.input_scale.item())


class QuantisedActivations(ScaledWeight):
    """Norm and SwiGLU are fused with the quantisation. The reference multiplies codes in float64,
    so CPUs keep the weight's codes in that type."""

    input_scale: nn.Parameter | None = None
    """`[]` float32: the static scale of activations."""
    gemms: Fp8Gemms | None = None
    """None: all rows run the kernel, which is batch-invariant."""
    tiles: torch.Tensor | None = None

    def __init__(
        self, out_features: int, in_features: int, placement: Placement, bias: nn.Parameter | None
    ) -> None:
        on_kernels = placement.device.type != "cpu" or has_kernels(placement.device)
        dtype = FP8 if on_kernels else torch.float64
        super().__init__(out_features, in_features, placement, bias, dtype)
        columns = 1 if placement.quantised.fp8 in ("tensor", "row") else self.scales.shape[1]
        # In memory `[columns, N]`, as the kernels read it.
        scales = torch.empty(columns, out_features, device=placement.device).t()
        self.scales = nn.Parameter(scales, requires_grad=False)
        assert placement.quantised.activations is not None
        self.activations, self.communicator = placement.quantised.activations, None
        if self.activations.shared_by == "tensor":
            zero = torch.zeros((), dtype=torch.float32, device=placement.device)
            self.input_scale = nn.Parameter(zero, requires_grad=False)
        elif placement.splits_inputs and self.activations.shared_by == "token":
            self.communicator = placement.communicator
        elif placement.splits_inputs:
            check_blocks(in_features, placement.mapping.tp_size, "tensor_parallel_size")

    def full_weight(self) -> torch.Tensor:
        columns = -(-self.weight.shape[1] // BLOCK)
        return dequantised(self.weight, self.scales.expand(-1, columns), self.dtype)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().parameters()
        if self.input_scale is not None:
            yield "input_scale", self.input_scale

    def slots(self, module: str, rows: slice, part: Part) -> Iterator[tuple[str, WeightSlot]]:
        own = self.weight[rows], part.shape, part.shard_dim, part.start, part.order
        scales = self.scales[rows], self.input_scale
        yield f"{module}.weight", CodesSlot(*own, *scales, module)

    def use_library(self, gemms: Fp8Gemms) -> None:
        """Called after loading: many rows run the library, whose order of sums depends on their
        number."""
        self.gemms = gemms
        self.tiles = tile_scales(self.scales) if self.scales.shape[1] > 1 else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return self._product(*self._quantised(x, norm))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return silu_and_mul(self.forward(x, norm))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._product(*self._quantised(x), total)

    def add_gated_to(
        self, total: torch.Tensor, gate_up: WeightFormat, x: torch.Tensor, norm: RMSNorm | None
    ) -> None:
        self._product(*self._quantised(gate_up.forward(x, norm), gated=True), total)

    def _product(
        self, codes: torch.Tensor, code_scales: torch.Tensor, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        operands = codes, code_scales, self.weight, self.scales
        if self.gemms is not None:
            output = add_to
            if output is None:
                output = self.weight.new_empty(len(codes), len(self.weight), dtype=self.dtype)
            adds = add_to is not None
            if self.gemms.run(*operands, self.tiles, self.bias, output, adds=adds):
                return output
        return fp8_linear(*operands, self.dtype, self.bias, add_to=add_to)

    def _quantised(
        self, x: torch.Tensor, norm: RMSNorm | None = None, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales. Ranks with slices of the inputs share the largest magnitude."""
        magnitudes = None
        if self.communicator is not None:
            own = x.abs().amax(1, keepdim=True).float()
            magnitudes = self.communicator.all_gather(own)
        return quantise_rows(
            x,
            None if norm is None else norm.kernel_weight,
            gated=gated,
            in_blocks=self.activations.shared_by == "block",
            scale=self.input_scale,
            magnitudes=magnitudes,
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
