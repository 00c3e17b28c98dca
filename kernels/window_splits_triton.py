"""The splits of window attention: the share of the keys that each has, and the kernel that joins
their results. Importing this file imports Triton."""

import triton
import triton.language as tl

from tllm_spec.kernels.key_spans_triton import first_key
from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous

LENGTHS = ["max_len", "num_splits", "min_keys", "offset"]
# In a mixed batch these start after the rows of the contexts, at any alignment. Specializing on the
# alignment would compile more kernels.
OFFSETS = ["kv_lens", "num_padding", "offsets"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def shares(
    kv_lens: tl.tensor,
    num_padding: tl.tensor,
    offsets: tl.tensor,
    request: tl.tensor,
    offset: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    SPAN: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number of the request's keys, of the window's rows without padding, and of the keys before
    those and a tree's region; the begin of the block that has the first of the latter that a row
    sees, a split's share of those from there on in whole blocks, and the number of splits that have
    a share. The last split also has the other keys."""
    # Lengths are older than the projection (programmatic_launch.py); L1 may hold stale ones.
    kv_len, num_own = tl.load(kv_lens + request, cache_modifier=".cg"), WINDOW
    if PADDED:
        num_own = WINDOW - tl.load(num_padding + request, cache_modifier=".cg").to(tl.int32)
    if RAGGED:
        end = tl.load(offsets + request + 1, cache_modifier=".cg")
        num_own = end - tl.load(offsets + request, cache_modifier=".cg")
    num_last = num_own + offset if HAS_OFFSET else num_own
    num_old = tl.minimum(tl.maximum(kv_len - num_last, 0), max_len)
    # The first row has position num_old, and no row sees earlier keys than that one.
    first = first_key(num_old, SPAN) // BLOCK_N * BLOCK_N if SPAN else 0
    num_seen = num_old - first
    number = tl.minimum(tl.maximum((num_seen - 1) // min_keys, 1), num_splits)
    share = tl.cdiv(tl.maximum(tl.cdiv(num_seen, number), 1), BLOCK_N) * BLOCK_N
    num_used = tl.maximum(tl.cdiv(num_seen, share), 1)
    return kv_len, num_own, num_old, first, share, num_used


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=OFFSETS)  # type: ignore[untyped-decorator]  # triton has no types
def reduction_kernel(
    partial_outputs: tl.tensor,
    log_sums: tl.tensor,
    kv_lens: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    num_padding: tl.tensor,
    offset: tl.tensor,
    offsets: tl.tensor,
    SPAN: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Joins the splits of `ROWS` output rows (query heads of a token) per program, which are of
    whole windows. Reads only the splits that had keys: the others hold results of an earlier
    launch."""
    launch_dependents(PDL)
    first = tl.program_id(0) * ROWS
    request = first // (WINDOW * HEADS)
    _, num_own, _, _, _, num_used = shares(
        kv_lens, num_padding, offsets, request, offset, max_len, num_splits, min_keys,
        SPAN, HAS_OFFSET, PADDED, RAGGED, WINDOW, BLOCK_N,
    )  # fmt: skip
    wait_for_previous(PDL)
    if num_used == 1:  # the attention kernel wrote the output
        return
    if RAGGED:
        if first // HEADS % WINDOW >= num_own:
            return
        first += (tl.load(offsets + request) - request * WINDOW) * HEADS
    rows, splits, dims = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used, real_dims = (splits < num_used)[None, :], (dims < HEAD_DIM)[None, :]
    parts = rows[:, None] * num_splits + splits[None, :]
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    pointers = partial_outputs + parts[:, :, None] * HEAD_DIM + dims[None, None, :]
    outputs = tl.load(pointers, mask=used[:, :, None] & real_dims[:, None, :], other=0.0)
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    result = tl.sum(outputs * weights[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = output + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, result.to(output.dtype.element_ty), mask=real_dims)
