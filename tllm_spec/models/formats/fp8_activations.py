"""FP8 weights, and activations that are quantised to FP8 (W8A8): kernels/gemm/fp8_numbers.py and
kernels/gemm/fp8_linear.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.fp8_linear import Fp8Gemms, fp8_linear, tile_scales
from tllm_spec.kernels.gemm.fp8_numbers import dequantised, quantise_rows
from tllm_spec.models.formats.fp8_formats import BLOCK
from tllm_spec.models.formats.fp8_scaled import FP8, Fp8Tensor, ScaledSlot, ScaledTensors
from tllm_spec.models.formats.weight_format import Part, WeightFormat
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.module import Placement, StoredWeight, WeightSlot, tp_sizes


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


class QuantisedActivations(ScaledTensors):
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
        columns = 1 if placement.fp8 in ("tensor", "row") else self.scales.shape[1]
        # In memory `[columns, N]`, as the kernels read it.
        scales = torch.empty(columns, out_features, device=placement.device).t()
        self.scales = nn.Parameter(scales, requires_grad=False)
        assert placement.activations is not None
        self.activations, self.communicator = placement.activations, None
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
