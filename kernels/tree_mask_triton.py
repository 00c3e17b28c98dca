"""Reads the bits of tree_mask.py in Triton kernels. Importing this file imports Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def is_set(bits: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Bits `index` `[N]` of `bits` `[R]`, `[R, N]`. An index above 63 reads bit 63."""
    return ((bits[:, None] >> tl.minimum(index, 63).to(tl.int64)[None, :]) & 1) != 0
