"""Element-wise work between GEMMs: RMSNorm of rows, and the activation of SwiGLU and GeGLU. A
Triton kernel if Triton is available, otherwise the plain-torch reference, which is the definition.
For a few rows `small_m_gemm` norms its own input instead."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided

# RMSNorm of rows: a Triton kernel if Triton is available, otherwise the plain-torch reference,
# which is the definition. For a few rows `small_m_gemm` norms its own input instead.


@dataclass(frozen=True)
class NormWeight:
    """RMSNorm of the input; eps is added to the mean square."""

    weight: torch.Tensor
    """`[K]`, of the rows' dtype or float32."""
    eps: float


@with_kernel("rms_norm_triton")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once.

    x: `[T, H]`, any stride between rows; weight: `[H]`, of x's dtype or float32. Returns `[T, H]`,
    contiguous from the kernel."""
    size = (x.shape[-1],)
    if weight.dtype == x.dtype:
        return F.rms_norm(x, size, weight, eps)
    return F.rms_norm(x.float(), size, weight, eps).to(x.dtype)


Parallel = tuple[torch.Tensor, NormWeight, NormWeight]
"""A second part `[T, H]`, its norm, and the norm of both parts' sum; all eps are equal."""


@with_kernel("add_norm_triton")
def add_norm(
    total: torch.Tensor,
    x: torch.Tensor,
    norm: NormWeight,
    *,
    factor: torch.Tensor | None = None,
    then: NormWeight | None = None,
    parallel: Parallel | None = None,
) -> torch.Tensor:
    """Adds `rms_norm` of x to `total`, in place, and rounds; multiplies by `factor`, and rounds
    again. Returns `rms_norm` of that with `then`, or without it `total`. parallel: what is added is
    the norm of the sum, rounded, of the norms of x and of the second part.

    total and x: `[T, H]` of one dtype, any stride between rows; factor: `[1]` of that dtype or
    float32."""
    normed = rms_norm.reference(x, norm.weight, norm.eps)
    if parallel is not None:
        other, other_norm, sum_norm = parallel
        normed = normed + rms_norm.reference(other, other_norm.weight, other_norm.eps)
        normed = rms_norm.reference(normed, sum_norm.weight, sum_norm.eps)
    total.add_(normed)
    if factor is not None:
        total.mul_(factor)
    return total if then is None else rms_norm.reference(total, then.weight, then.eps)


# It takes the same steps as F.rms_norm (float32 squares, one division by H, rsqrt, two
# multiplications, one rounding), but sums the squares in another order. So float32 results may
# differ by a few units in the last place, and 16-bit results by one.


_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    output = x.new_empty(x.shape)
    _launch(x, NormWeight(weight, eps), output)
    return output


def add_norm_triton(
    total: torch.Tensor,
    x: torch.Tensor,
    norm: NormWeight,
    *,
    factor: torch.Tensor | None = None,
    then: NormWeight | None = None,
    parallel: Parallel | None = None,
) -> torch.Tensor:
    """See `add_norm`."""
    normed = None if then is None else x.new_empty(x.shape)
    _launch(x, norm, normed, total, factor, then, parallel)
    return total if normed is None else normed


def _launch(
    x: torch.Tensor,
    norm: NormWeight,
    output: torch.Tensor | None,
    total: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    then: NormWeight | None = None,
    parallel: Parallel | None = None,
) -> None:
    (num_rows, size), (other, *further) = x.shape, parallel or (None, None, None)
    for each in (norm, then, *further):
        assert each is None or each.weight.is_contiguous()
    assert all(each is None or each.eps == norm.eps for each in further)
    for rows in (x, total, other):
        assert rows is None or (rows.shape == x.shape and (rows.stride(1) == 1 or size == 1))
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        *(*strided(x), norm.weight, norm.eps, output, *strided(total), factor),
        *((None, 0.0) if then is None else (then.weight, then.eps)),
        *(*strided(other), *(None if each is None else each.weight for each in further)),
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(x.device),
        num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
    )


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
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, eps: tl.tensor, output: tl.tensor,
    total: tl.tensor, total_stride: tl.tensor, factor: tl.tensor, next_weight: tl.tensor,
    next_eps: tl.tensor, other: tl.tensor, other_stride: tl.tensor, other_weight: tl.tensor,
    sum_weight: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row per program, in registers. Without `total` the output is x's norm."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    own_type: tl.constexpr = x.dtype.element_ty
    normed = norm_row(x + row * x_stride, weight, eps, columns, real, SIZE).to(own_type)
    if other is not None:
        parallel = norm_row(other + row * other_stride, other_weight, eps, columns, real, SIZE)
        both = (normed.to(tl.float32) + parallel.to(own_type).to(tl.float32)).to(own_type)
        weights = tl.load(sum_weight + columns, mask=real, other=0.0)
        normed = normed_row(both, weights, eps, SIZE).to(own_type)
    if total is not None:
        places = total + row * total_stride + columns
        normed = normed.to(tl.float32) + tl.load(places, mask=real, other=0.0).to(tl.float32)
        if factor is not None:
            normed = normed.to(own_type).to(tl.float32) * tl.load(factor).to(tl.float32)
        normed = normed.to(own_type)
        tl.store(places, normed, mask=real)
        if next_weight is not None:
            weights = tl.load(next_weight + columns, mask=real, other=0.0)
            normed = normed_row(normed, weights, next_eps, SIZE).to(own_type)
    if output is not None:
        tl.store(output + row * SIZE + columns, normed, mask=real)


# The activation of SwiGLU, `silu(gate) * up`, or of GeGLU, `gelu(gate) * up`, on the output of a
# fused projection, and `sigmoid(gate) * up`: a Triton kernel if Triton is available, otherwise the
# plain-torch reference, which is the definition.


Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As `hidden_act` of a config.json. The second is GELU with tanh (arXiv 1606.08415, section 2)."""
Gate = Literal[Activation, "sigmoid"]
_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": F.sigmoid,
}


@with_kernel("silu_and_mul_triton")
def silu_and_mul(
    gate_up: torch.Tensor, activation: Gate = "silu", ups: torch.Tensor | None = None
) -> torch.Tensor:
    """`[T, 2 * I]` (gates first, any stride between rows) to `[T, I]`, in float32, rounded once.
    activation: of the gates. ups: `[T, I]`, any stride between rows; then `gate_up` has gates
    only."""
    gate, up = gate_up.chunk(2, -1) if ups is None else (gate_up, ups)
    activate = _GATES[activation]
    return (activate(gate.float()) * up).to(gate_up.dtype)


# The exponential and the division are the device's approximations. Together their relative error
# is at most 2**-21, and for negative gates another |gate| * 2**-24, from the rounding of gate *
# log2(e). So 16-bit results may differ from the reference's by one unit in the last place.
#
# GELU is taken as gate * sigmoid(2 u), which is gate * (1 + tanh(u)) / 2. For negative gates the
# reference's sum 1 + tanh(u) cancels, and the kernel's result is the better one: they differ by up
# to |gate| * 2**-24.


_BLOCK = 1024  # columns per program: one 16-byte load of 2-byte elements per thread and operand


def silu_and_mul_triton(
    gate_up: torch.Tensor, activation: Gate = "silu", ups: torch.Tensor | None = None
) -> torch.Tensor:
    """See `silu_and_mul`."""
    if ups is None:
        assert gate_up.shape[1] % 2 == 0
        ups = gate_up[:, gate_up.shape[1] // 2 :]
    num_rows, size = ups.shape
    assert gate_up.stride(1) == 1 and (ups.stride(1) == 1 or size == 1)
    output = gate_up.new_empty(num_rows, size)
    silu_and_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        *strided(gate_up, ups),
        output,
        IS_GELU=activation == "gelu_pytorch_tanh",
        IS_SIGMOID=activation == "sigmoid",
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
    gates: tl.tensor, gate_stride: tl.tensor, ups: tl.tensor, up_stride: tl.tensor,
    output: tl.tensor, IS_GELU: tl.constexpr, IS_SIGMOID: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gate = tl.load(gates + row * gate_stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + columns, mask=real, other=0.0).to(tl.float32)
    # exp(-gate) is infinite for gates below -88; the quotient is then -0, the right limit.
    factor = 1.0 if IS_SIGMOID else gate
    activated = factor / (1.0 + tl.exp(-activation_slope(gate, IS_GELU))) * up
    tl.store(output + row * SIZE + columns, activated.to(output.dtype.element_ty), mask=real)


# A soft bound of logits, `cap * tanh(x / cap)`: a Triton kernel if Triton is available, otherwise
# the plain-torch reference, which is the definition.


@with_kernel("soft_cap_triton")
def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x `[T, N]`, contiguous, is changed in place and returned; in float32, rounded once."""
    return x.copy_((x.float() / cap).tanh_().mul_(cap))


def soft_cap_triton(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See `soft_cap`."""
    assert x.is_contiguous()
    grid = (x.shape[0], triton.cdiv(x.shape[1], _BLOCK))
    soft_cap_kernel[grid](x, x.shape[1], cap, _BLOCK, **programmatic_launch(x.device, 4))
    return x


@triton.jit
def soft_cap_kernel(
    x: tl.tensor, size: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = x + tl.program_id(0).to(tl.int64) * size + columns
    value = tl.load(places, mask=columns < size, other=0.0).to(tl.float32) / cap
    square = value * value
    # tanh is a difference that cancels for small values, which take its series.
    series = value * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    bounded = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * value))
    result = tl.where(square < 0.0144, series, bounded) * cap
    tl.store(places, result.to(x.dtype.element_ty), mask=columns < size)
