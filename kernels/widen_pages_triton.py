"""The Triton kernel of widen_pages.py, which describes inputs and outputs. Importing this file
imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.kv_codes import CODES
from tllm_spec.kernels.kv_codes_triton import widened
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def widen_pages_kernel(
    layer: tl.tensor,
    value_offset: tl.tensor,
    pages: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_value_offset: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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
