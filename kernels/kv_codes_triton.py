"""Triton functions of kv_codes.py for kernels that read and write a KV pool. Importing this file
imports Triton."""

import triton
import triton.language as tl

from tllm_spec.kernels.quantise_rows_triton import on_grid


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def encoded_block(numbers: tl.tensor, inverse_scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`numbers` as a pool of type DTYPE stores them."""
    if tl.float8e4nv == DTYPE:
        scaled = numbers.to(tl.float32) * inverse_scale
        # A NaN stays one.
        bounded = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        numbers = on_grid(bounded).to(tl.float8e4nv)
    return numbers.to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def widened(stored: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """What a pool stores, in the type DTYPE of a tensor core's operand."""
    if stored.dtype == tl.float8e4nv:
        # The direct conversion to bfloat16 has an eighth of the throughput.
        stored = stored.to(tl.float32)
    return stored.to(DTYPE)
