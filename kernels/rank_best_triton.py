"""The Triton kernel of rank_best.py, which describes inputs and outputs; rank_lines.py describes
the protocol. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.rank_lines import BLOCK_WORDS, RankLines
from tllm_spec.kernels.rank_sum_triton import PROGRAMS, memory_of, send

ROWS = BLOCK_WORDS // 2  # of a block


def rank_best_triton(lines: RankLines, offers: torch.Tensor) -> torch.Tensor:
    """See `rank_best`."""
    num_rows = len(offers)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=offers.device)
    rank_best_kernel[(min(triton.cdiv(num_rows, ROWS), PROGRAMS),)](
        offers,
        tokens,
        num_rows,
        lines.addresses,
        lines.counts,
        CAPACITY=lines.capacity,
        RANK=lines.rank,
        RANKS=lines.addresses.numel(),
        SLOTS=triton.next_power_of_2(lines.addresses.numel()),
        ROWS=ROWS,
        num_warps=4,
        **programmatic_launch(offers.device),
    )
    return tokens


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rank_best_kernel(
    offers: tl.tensor,
    tokens: tl.tensor,
    num_rows: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (programs), each of which has every so-many-th block of rows: it sends all of them
    before it waits for any. SLOTS: RANKS or more. A row has two words."""
    begin(PDL)
    first, step, num_blocks = tl.program_id(0), tl.num_programs(0), tl.cdiv(num_rows, ROWS)
    for block in range(first, num_blocks, step):
        rows = block * ROWS + tl.arange(0, ROWS)
        real = rows < num_rows
        number = tl.load(counts + block) + 1
        for half in tl.static_range(2):
            words = 2 * rows + half
            own = tl.load(offers + words, mask=real, other=0)
            send(own, words, real, number, addresses, CAPACITY, RANK, RANKS, SLOTS)
    for block in range(first, num_blocks, step):
        rows = block * ROWS + tl.arange(0, ROWS)
        real = rows < num_rows
        number = tl.load(counts + block) + 1
        own_value = tl.load(offers + 2 * rows, mask=real, other=0)
        own_column = tl.load(offers + 2 * rows + 1, mask=real, other=0)
        mine = (
            memory_of(RANK, True, addresses, tl.int64) + (number & 1) * RANKS * CAPACITY + 2 * rows
        )
        column = own_column
        is_late = 1
        while is_late != 0:
            late = tl.zeros([ROWS], tl.int32)
            best = own_value.to(tl.float32, bitcast=True)
            column = own_column
            for source in tl.static_range(RANKS):
                if source != RANK:
                    place = mine + source * CAPACITY
                    lower = tl.load(place, mask=real, other=0, volatile=True)
                    upper = tl.load(place + 1, mask=real, other=0, volatile=True)
                    late |= ((lower >> 32).to(tl.int32) != number).to(tl.int32)
                    late |= ((upper >> 32).to(tl.int32) != number).to(tl.int32)
                    value = lower.to(tl.int32).to(tl.float32, bitcast=True)
                    other = upper.to(tl.int32)
                    wins = (value > best) | ((value == best) & (other < column))
                    best, column = tl.where(wins, value, best), tl.where(wins, other, column)
            is_late = tl.max(late & real.to(tl.int32), 0)
        tl.store(tokens + rows, column.to(tl.int64), mask=real)
        tl.store(counts + block, number)
