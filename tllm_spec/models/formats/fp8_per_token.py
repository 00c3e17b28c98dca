"""FP8 weights, and activations that are quantised to FP8 with one scale a token (W8A8):
kernels/quantise_rows.py and kernels/fp8_linear.py."""

import torch
from torch import nn

from tllm_spec.kernels.fp8_linear import fp8_linear
from tllm_spec.kernels.quantise_rows import quantise_rows
from tllm_spec.kernels.triton_support import has_kernels
from tllm_spec.models.formats.fp8_scaled import FP8, ScaledTensors
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.module import Placement


class PerTokenWeight(ScaledTensors):
    """A row's result has the same bits in every batch. The norm is fused with the quantisation. The
    reference multiplies codes in float64, so CPUs keep the weight's codes in that type."""

    def __init__(
        self, out_features: int, in_features: int, placement: Placement, bias: nn.Parameter | None
    ) -> None:
        on_kernels = placement.device.type != "cpu" or has_kernels(placement.device)
        dtype = FP8 if on_kernels else torch.float64
        super().__init__(out_features, in_features, placement, bias, dtype)
        assert placement.activations is not None
        self.bound = placement.activations.bound
        self.communicator = placement.communicator if placement.splits_inputs else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        codes = self._quantised(x, norm)
        return fp8_linear(*codes, self.weight, self.scales, self.dtype, self.bias)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        codes = self._quantised(x, None)
        fp8_linear(*codes, self.weight, self.scales, self.dtype, self.bias, add_to=total)

    def _quantised(
        self, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales. Ranks with slices of the inputs share the largest magnitude."""
        magnitudes = None
        if self.communicator is not None:
            own = x.abs().amax(1, keepdim=True).float()
            magnitudes = self.communicator.all_gather(own).amax(1)
        own_norm = None if norm is None else norm.kernel_weight
        return quantise_rows(x, own_norm, magnitudes, self.bound)
