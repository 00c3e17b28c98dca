"""Numbers of a KV pool in FP8 (E4M3): a code is a number of the model's type divided by a constant
scale, rounded to nearest, ties to even; larger ones saturate. So a token's codes depend on nothing
but the token. Attention multiplies by codes, which every type holds exactly: the scale of keys is
part of the softmax's, and that of values multiplies the result."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.fp8_numbers import LARGEST, on_grid
from tllm_spec.kernels.launch import begin, programmatic_launch

CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class KVScales:
    """What a layer's codes are multiplied by. `key`: also of MLA's latents and shared keys."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def encoded(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """The codes of `numbers`. A NaN stays one."""
    # By the reciprocal in float32, as in kv_codes_triton.py and window_stage.cuh.
    return (numbers.float() * (1 / scale)).clamp_(-LARGEST, LARGEST).to(CODES)


def times(output: torch.Tensor, scale: float) -> torch.Tensor:
    """`output` multiplied by a scale of codes. Without codes nothing is launched."""
    return output if scale == 1.0 else output * scale


def movable(stored: torch.Tensor) -> torch.Tensor:
    """A view of the same shape, of a type that torch can scatter on every device."""
    return stored.view(torch.uint8) if stored.dtype == CODES else stored


@triton.jit
def encoded_block(numbers: tl.tensor, inverse_scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`numbers` as a pool of type DTYPE stores them."""
    if tl.float8e4nv == DTYPE:
        scaled = numbers.to(tl.float32) * inverse_scale
        # A NaN stays one.
        bounded = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        numbers = on_grid(bounded).to(tl.float8e4nv)
    return numbers.to(DTYPE)


@triton.jit
def widened(stored: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """What a pool stores, in the type DTYPE of a tensor core's operand."""
    if stored.dtype == tl.float8e4nv:
        # The direct conversion to bfloat16 has an eighth of the throughput.
        stored = stored.to(tl.float32)
    return stored.to(DTYPE)


# Copies pages of FP8 codes as numbers of 16 or 32 bits, exactly, for attention kernels that read
# no codes. A Triton kernel if Triton is available, otherwise the plain-torch reference.


@with_kernel("widen_pages_triton")
def widen_pages(
    layer: torch.Tensor, pages: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Page `pages[i]` of the layer becomes page i of `out`, for all i below `count`.

    Args:
        layer: `[2, pages, page_size, Hkv, D]` of CODES, contiguous.
        pages: `[N]` int32, contiguous.
        count: `[1]` int32, on the device; None: N.
        out: `[2, N or more, page_size, Hkv, D]`, contiguous.
    """
    if count is not None:
        pages = pages[: int(count)]
    out[:, : len(pages)] = layer.index_select(1, pages)


_BLOCK = 8192  # 64 codes a thread


def widen_pages_triton(
    layer: torch.Tensor, pages: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor
) -> None:
    """See `widen_pages`."""
    assert layer.dtype == CODES and layer.shape[2:] == out.shape[2:]
    for tensor in (layer, pages, out):
        assert tensor.is_contiguous()
    size = layer[0, 0].numel()
    block = min(_BLOCK, triton.next_power_of_2(size))
    widen_pages_kernel[(triton.cdiv(size, block), len(pages), 2)](
        *(layer, layer.stride(0), pages, count, out, out.stride(0)),
        SIZE=size,
        BLOCK=block,
        num_warps=4,
        **programmatic_launch(out.device),
    )


@triton.jit
def widen_pages_kernel(
    layer: tl.tensor, value_offset: tl.tensor, pages: tl.tensor, count: tl.tensor, out: tl.tensor,
    out_value_offset: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (parts of a page, pages, keys and values). SIZE: of a page."""
    begin(PDL)
    index, half = tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_pages = tl.num_programs(1) if count is None else tl.load(count)
    if index >= num_pages:
        return
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    source = layer + half * value_offset + tl.load(pages + index).to(tl.int64) * SIZE
    target = out + half * out_value_offset + index.to(tl.int64) * SIZE
    codes = tl.load(source + columns, mask=real, other=0.0)
    tl.store(target + columns, widened(codes, out.dtype.element_ty), mask=real)
