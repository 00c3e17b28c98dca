"""A linear layer for up to 8 rows with its prologue and epilogue in one kernel: RMSNorm of the
input before the GEMM; bias, SiLU gate or residual addition after it.

`small_m_gemm` runs one CUDA kernel, where it is supported (`serves`). Its time is that of reading
the weights once. For more rows torch's GEMM with separate ops is faster.

The kernel computes the norm in another order than the reference: it rounds x times the norm's
weight and divides the finished sums by the root mean square. The reference rounds the whole norm.
Everything else is float32, rounded once."""

import ctypes

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.int4_weights import check_int4
from tllm_spec.kernels.rms_norm import NormWeight, rms_norm
from tllm_spec.kernels.scaled_linear import BLOCK, check_scaled, scaled_linear
from tllm_spec.kernels.silu_and_mul import silu_and_mul
from tllm_spec.kernels.small_m_plan import MAX_ROWS, WIDE, Stored, plan, splits_that_fit

FP8 = torch.float8_e4m3fn


def small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    group: int = 0,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) W^T + bias`; if gated, the SiLU of its first half times its second half; added to
    `add_to` if given. The kernel must serve these tensors (`serves`).

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`, contiguous, of the type of x, or FP8 with scales, or packed codes of 4
            bits with words (int4_weights.py).
        scales: of FP8 `[N, ceil(K / 128)]` float32, or words `[N, ceil(K / group)]`.
        group: inputs that share a word of codes of 4 bits.
        bias: `[N]`.
        norm: of x, or None.
        gated: the output is `[T, N / 2]`.
        add_to: the residual stream, of the output's shape, any stride between rows; changed in
            place and returned.
    """
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    output = x.new_empty(x.shape[0], features) if add_to is None else add_to
    assert output.shape == (x.shape[0], features)
    if norm is not None and (x.dtype == torch.float16 or norm.weight.dtype != x.dtype):
        # In float16 x times the norm's weight, without the division, could overflow.
        x, norm = rms_norm(x, norm.weight, norm.eps), None
    _launch(x, weight, scales, group, bias, norm, gated, add_to, output)
    return output


def stored_as(weight: torch.Tensor, scales: torch.Tensor | None, group: int) -> Stored:
    if scales is None:
        return WIDE
    if weight.dtype == FP8:
        return Stored(8, BLOCK)
    return Stored(4, group, scales.dtype == torch.uint8)


def serves(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None = None, group: int = 0
) -> bool:
    """Whether the kernel supports the device, type and sizes."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and bool(splits_that_fit(x.shape[0], x.shape[1], stored_as(weight, scales, group)))
        and nvrtc.why_unavailable(x.device.index or 0) is None
    )


class _Arguments(ctypes.Structure):
    """The kernel's argument: same layout as `Gemm` in small_m_gemm.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "bias", "norm_weight", "residual", "weight", "scales", "out")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("out_features", "in_features", "x_stride", "out_stride")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("num_tokens", "num_tiles", "row_groups", "splits", "gated")
        ),
        ("eps", ctypes.c_float),
    )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    norm: NormWeight | None,
    gated: bool,
    add_to: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    assert x.stride(1) == output.stride(1) == 1 and weight.is_contiguous()
    stored = stored_as(weight, scales, group)
    assert (scales is not None) == (stored.bits < 16)
    if scales is not None and stored.bits == 8:
        check_scaled(weight, scales)
    elif scales is not None:
        check_int4(weight, scales, group, x.shape[1])
    (rows, features), device = output.shape, x.device.index or 0
    prepared = plan(device, x.dtype, rows, x.shape[1], features, gated, stored)
    norm_weight = None if norm is None else norm.weight
    operands = (x, bias, norm_weight, add_to, weight, scales, output)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in operands)
    tiles = prepared.tiles
    arguments = _Arguments(
        *addresses,
        *(weight.shape[0], x.shape[1], x.stride(0), output.stride(0)),
        *(rows, tiles.number, tiles.row_groups, tiles.splits, gated),
        0.0 if norm is None else norm.eps,
    )
    prepared.kernel.launch(
        prepared.launch, torch.cuda.current_stream(device).cuda_stream, arguments
    )


def plain_small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    group: int = 0,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `small_m_gemm`."""
    if norm is not None:
        x = rms_norm.reference(x, norm.weight, norm.eps)
    if scales is None:
        output = torch.nn.functional.linear(x, weight, bias)
    else:
        output = scaled_linear.reference(x, weight, scales, bias, group=group)
    if gated:
        output = silu_and_mul.reference(output)
    return output if add_to is None else add_to.add_(output)
