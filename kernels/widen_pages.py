"""Copies pages of FP8 codes as numbers of 16 or 32 bits, exactly, for attention kernels that read
no codes. A Triton kernel if Triton is available, otherwise the plain-torch reference."""

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("widen_pages_triton.widen_pages_triton")
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
