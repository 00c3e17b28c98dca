"""The Triton kernel of rank_sum.py, which describes inputs and outputs; rank_lines.py describes the
protocol. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.rank_lines import BLOCK_WORDS, WORD_BYTES, RankLines

PROGRAMS = 256  # at most: all run at once on every supported GPU, so none waits for one to start


def rank_sum_triton(
    lines: RankLines, values: torch.Tensor, add_to: torch.Tensor | None = None
) -> None:
    """See `rank_sum`."""
    output = values if add_to is None else add_to
    num_words = values.numel() * values.element_size() // WORD_BYTES
    rank_sum_kernel[(min(triton.cdiv(num_words, BLOCK_WORDS), PROGRAMS),)](
        values.view(-1).view(torch.int32),
        output.view(-1).view(torch.int32),
        num_words,
        lines.addresses,
        lines.counts,
        CAPACITY=lines.capacity,
        RANK=lines.rank,
        RANKS=lines.addresses.numel(),
        SLOTS=triton.next_power_of_2(lines.addresses.numel()),
        ADDS=add_to is not None,
        PACKED=values.dtype == torch.bfloat16,
        BLOCK=BLOCK_WORDS,
        num_warps=4,
        **programmatic_launch(values.device),
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rank_sum_kernel(
    values: tl.tensor,
    output: tl.tensor,
    num_words: tl.tensor,
    addresses: tl.tensor,
    counts: tl.tensor,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    ADDS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (programs), each of which has every so-many-th block of words: it sends all of them
    before it waits for any. SLOTS: RANKS or more. PACKED: a word is two bfloat16. A block has its
    own lines and its own count, so blocks of one rank do not wait for each other. A program that
    waits adds again all that it has found: to wait for one source after the other would take as
    many times the latency of a load."""
    begin(PDL)
    first, step, num_blocks = tl.program_id(0), tl.num_programs(0), tl.cdiv(num_words, BLOCK)
    for block in range(first, num_blocks, step):
        words = block * BLOCK + tl.arange(0, BLOCK)
        real = words < num_words
        number = tl.load(counts + block) + 1
        own = tl.load(values + words, mask=real, other=0)
        send(own, words, real, number, addresses, CAPACITY, RANK, RANKS, SLOTS)
    for block in range(first, num_blocks, step):
        words = block * BLOCK + tl.arange(0, BLOCK)
        real = words < num_words
        number = tl.load(counts + block) + 1
        own = tl.load(values + words, mask=real, other=0)
        if ADDS:
            total = tl.load(output + words, mask=real, other=0)
        mine = memory_of(RANK, True, addresses, tl.int64) + (number & 1) * RANKS * CAPACITY
        low = tl.zeros([BLOCK], tl.float32)
        high = tl.zeros([BLOCK], tl.float32)
        is_late = 1
        while is_late != 0:  # the loads of all sources are under way together
            late = tl.zeros([BLOCK], tl.int32)
            low = tl.zeros([BLOCK], tl.float32)
            high = tl.zeros([BLOCK], tl.float32)
            for source in tl.static_range(RANKS):
                word = own
                if source != RANK:
                    place = mine + source * CAPACITY + words
                    line = tl.load(place, mask=real, other=0, volatile=True)
                    late |= ((line >> 32).to(tl.int32) != number).to(tl.int32)
                    word = line.to(tl.int32)
                low, high = low + lower(word, PACKED), high + upper(word)
            is_late = tl.max(late & real.to(tl.int32), 0)
        if ADDS:
            low = lower(total, PACKED) + rounded(low, PACKED)
            high = upper(total) + rounded(high, PACKED)
        tl.store(output + words, packed(low, high, PACKED), mask=real)
        tl.store(counts + block, number)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def send(
    own: tl.tensor,
    words: tl.tensor,
    real: tl.tensor,
    number: tl.tensor,
    addresses: tl.tensor,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Writes own words to the lines of all other ranks. `words`: their indices."""
    line = (number.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    ranks = tl.arange(0, SLOTS)
    is_other = (ranks < RANKS) & (ranks != RANK)
    theirs = memory_of(ranks, is_other, addresses, tl.int64)
    place = ((number & 1) * RANKS + RANK) * CAPACITY + words
    mask = is_other[:, None] & real[None, :]
    tl.store(theirs[:, None] + place[None, :], line[None, :], mask=mask)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def memory_of(
    ranks: tl.tensor, is_wanted: tl.tensor, addresses: tl.tensor, WORD: tl.constexpr
) -> tl.tensor:
    """The memory of ranks. Its alignment is what lets a thread write 16 bytes at a time."""
    found = tl.load(addresses + ranks, mask=is_wanted, other=0)
    return tl.multiple_of(found.to(tl.pointer_type(WORD)), 16)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def lower(word: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """The float32, or the first of two bfloat16."""
    return (word << 16 if PACKED else word).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def upper(word: tl.tensor) -> tl.tensor:
    """The second of two bfloat16."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rounded(value: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    return value.to(tl.bfloat16).to(tl.float32) if PACKED else value


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def packed(low: tl.tensor, high: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """The word of one or two values."""
    if PACKED:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        word = first | (second << 16)
    else:
        word = low.to(tl.int32, bitcast=True)
    return word
