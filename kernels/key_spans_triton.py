"""`KeySpan.first_key` in Triton kernels. Importing this file imports Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def first_key(positions: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """The lowest position that queries at `positions` see. SPAN: `KeySpan.code`, not 0."""
    if SPAN < 0:
        return tl.maximum(positions + (SPAN + 1), 0)
    return tl.maximum(positions, 0) // SPAN * SPAN
