"""Element-wise work between GEMMs: RMSNorm of rows, and the activation of SwiGLU and GeGLU. A
Triton kernel if Triton is available, otherwise the plain-torch reference, which is the definition.
For a few rows `small_m_gemm` norms its own input instead."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

# RMSNorm of rows: a Triton kernel if Triton is available, otherwise the plain-torch reference,
# which is the definition. For a few rows `small_m_gemm` norms its own input instead.


@dataclass(frozen=True)
class NormWeight:
    """RMSNorm of the input; eps is added to the mean square."""

    weight: torch.Tensor
    """`[K]`, of the rows' dtype or float32."""
    eps: float


@with_kernel("rms_norm_triton")
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once; then added
    to `add_to`, which is rounded again.

    x: `[T, H]`, any stride between rows; weight: `[H]`, of x's dtype or float32; add_to: `[T, H]`
    of x's dtype, any stride between rows; changed in place and returned. Without it, returns
    `[T, H]`, contiguous from the kernel."""
    size = (x.shape[-1],)
    if weight.dtype == x.dtype:
        normed = F.rms_norm(x, size, weight, eps)
    else:
        normed = F.rms_norm(x.float(), size, weight, eps).to(x.dtype)
    return normed if add_to is None else add_to.add_(normed)


# It takes the same steps as F.rms_norm (float32 squares, one division by H, rsqrt, two
# multiplications, one rounding), but sums the squares in another order. So float32 results may
# differ by a few units in the last place, and 16-bit results by one.


_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """See `rms_norm`."""
    num_rows, size = x.shape
    assert weight.is_contiguous() and (x.stride(1) == 1 or size == 1)
    output = x.new_empty(num_rows, size) if add_to is None else add_to
    assert output.shape == x.shape and (output.stride(1) == 1 or size == 1)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        x.stride(0),
        weight,
        output,
        output.stride(0),
        eps,
        ADDS=add_to is not None,
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(x.device),
        num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
    )
    return output


@triton.jit
def norm_row(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, columns: tl.tensor, real: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """RMSNorm of one row, in float32."""
    weights = tl.load(weight + columns, mask=real, other=0.0)
    return normed_row(tl.load(x + columns, mask=real, other=0.0), weights, eps, SIZE)


@triton.jit
def normed_row(
    values: tl.tensor, weights: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """`norm_row` of loaded values, 0 after SIZE."""
    values, weights = values.to(tl.float32), weights.to(tl.float32)
    mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
    return values * tl.rsqrt(mean_square + eps) * weights


@triton.jit
def rms_norm_kernel(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, output: tl.tensor,
    output_stride: tl.tensor, eps: tl.tensor, ADDS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row per program, in registers."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    normed = norm_row(x + row * x_stride, weight, eps, columns, real, SIZE)
    normed = normed.to(output.dtype.element_ty)
    targets = output + row * output_stride + columns
    if ADDS:
        old = tl.load(targets, mask=real, other=0.0).to(tl.float32)
        normed = (old + normed.to(tl.float32)).to(output.dtype.element_ty)
    tl.store(targets, normed, mask=real)


# The activation of SwiGLU, `silu(gate) * up`, or of GeGLU, `gelu(gate) * up`, on the output of a
# fused projection: a Triton kernel if Triton is available, otherwise the plain-torch reference,
# which is the definition.


Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As `hidden_act` of a config.json. The second is GELU with tanh (arXiv 1606.08415, section 2)."""


@with_kernel("silu_and_mul_triton")
def silu_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`[T, 2 * I]` (gates first, any stride between rows) to `[T, I]`, in float32, rounded once.
    activation: of the gates."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.float()
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up).to(gate_up.dtype)


# The exponential and the division are the device's approximations. Together their relative error
# is at most 2**-21, and for negative gates another |gate| * 2**-24, from the rounding of gate *
# log2(e). So 16-bit results may differ from the reference's by one unit in the last place.
#
# GELU is taken as gate * sigmoid(2 u), which is gate * (1 + tanh(u)) / 2. For negative gates the
# reference's sum 1 + tanh(u) cancels, and the kernel's result is the better one: they differ by up
# to |gate| * 2**-24.


_BLOCK = 1024  # columns per program: one 16-byte load of 2-byte elements per thread and operand


def silu_and_mul_triton(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """See `silu_and_mul`."""
    (num_rows, width), size = gate_up.shape, gate_up.shape[1] // 2
    assert width == 2 * size and gate_up.stride(1) == 1
    output = gate_up.new_empty(num_rows, size)
    silu_and_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate_up,
        gate_up.stride(0),
        output,
        IS_GELU=activation != "silu",
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **programmatic_launch(gate_up.device),
    )
    return output


@triton.jit
def activation_slope(gate: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:
    """The activation of `gate` is `gate * sigmoid(slope)`."""
    slope = gate
    if IS_GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return slope


@triton.jit
def silu_and_mul_kernel(
    gate_up: tl.tensor, row_stride: tl.tensor, output: tl.tensor, IS_GELU: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gates = gate_up + row * row_stride + columns
    gate = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=real, other=0.0).to(tl.float32)
    # exp(-gate) is infinite for gates below -88; the quotient is then -0, the right limit.
    activated = gate / (1.0 + tl.exp(-activation_slope(gate, IS_GELU))) * up
    tl.store(output + row * SIZE + columns, activated.to(output.dtype.element_ty), mask=real)
