"""The Triton kernel of moe_permute.py, which describes inputs and outputs. Importing this file
imports Triton.

A program per expert reads all assignments: each finds where its expert's rows begin without waiting
for another program."""

import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch_triton import begin


@triton.jit(do_not_specialize=["number", "room"])  # type: ignore[untyped-decorator]  # triton has no types
def moe_permute_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    number: tl.tensor,
    room: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (experts)."""
    begin(PDL)
    expert, bins = tl.program_id(0), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in tl.range(0, number, BLOCK):
        assignments = start + tl.arange(0, BLOCK)
        ids = tl.load(experts + assignments, mask=assignments < number, other=0)
        counts += tl.histogram(ids, BINS)
    # What was read past the end was counted as expert 0.
    counts -= tl.where(bins == 0, tl.cdiv(number, BLOCK) * BLOCK - number, 0)
    needed = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    if expert == 0:
        tl.store(num_blocks, tl.sum(needed, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), 0)

    first_block = tl.sum(tl.where(bins < expert, needed, 0), 0)
    for start in tl.range(0, tl.cdiv(end - first, BLOCK_ROWS), BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        own = blocks + first_block + index
        first_rows = first + index * BLOCK_ROWS
        used = first_rows < end
        tl.store(own, tl.zeros([BLOCKS], tl.int32) + expert, mask=used)
        tl.store(own + room, first_rows, mask=used)
        tl.store(own + 2 * room, tl.zeros([BLOCKS], tl.int32) + end, mask=used)

    if end > first:
        for start in tl.range(0, number, BLOCK):
            assignments = start + tl.arange(0, BLOCK)
            ids = tl.load(experts + assignments, mask=assignments < number, other=-1)
            mine = (ids == expert).to(tl.int32)
            rows = first + tl.cumsum(mine, 0) - 1
            tl.store(order + rows, assignments, mask=mine != 0)
            first += tl.sum(mine, 0)
