"""The Triton kernel of token_mask.py, which describes the arguments. Importing this file imports
Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_BLOCK = 4096


def mask_tokens_triton(
    logits: torch.Tensor, mask_of_row: torch.Tensor, bitmasks: torch.Tensor, first: int = 0
) -> None:
    """See `mask_tokens`."""
    assert logits.stride(1) == 1 and mask_of_row.is_contiguous() and bitmasks.is_contiguous()
    num_tokens = logits.shape[1]
    mask_tokens_kernel[(len(logits), triton.cdiv(num_tokens, _BLOCK))](
        logits,
        logits.stride(0),
        mask_of_row,
        bitmasks,
        bitmasks.shape[1],
        first,
        num_tokens,
        BLOCK=_BLOCK,
        **programmatic_launch(logits.device),
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def mask_tokens_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    mask_of_row: tl.tensor,
    bitmasks: tl.tensor,
    num_words: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A block of one row per program. Only excluded logits are written, none is read."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(mask_of_row + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = tokens < tl.where(index >= 0, num_tokens, 0)  # nothing without a mask
    ids = first + tokens
    words = tl.load(bitmasks + index * num_words + ids // 32, mask=real, other=-1)
    excluded = ((words >> (ids % 32)) & 1) == 0
    infinity = tl.full((BLOCK,), float("inf"), tl.float32)
    values = (-infinity).to(logits.dtype.element_ty)
    tl.store(logits + row * stride + tokens, values, mask=real & excluded)
