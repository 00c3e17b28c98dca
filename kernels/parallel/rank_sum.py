"""Sums of all ranks' tensors and the best of their tokens, in one kernel, of which each rank runs
one at the same time: every rank writes its values into the memory of all others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import has_kernels, tl, triton
from tllm_spec.kernels.launch import begin, programmatic_launch

# The memory in which ranks write each other's values (rank_sum.py).
#
# What is written are lines of 8 bytes: 4 bytes of values, and the number of the sum. A line is
# written and read as a whole, so a reader that finds the number has the values, and needs no fence
# and no other signal (NCCL calls this protocol LL). The number is a count in device memory, so
# that replays of a CUDA graph go on counting. Two buffers take turns. A rank that is in its sum n
# has received all lines of sum n - 1 from every other rank, and these ended sum n - 2 before they
# sent them. So the buffer of sum n - 2 can be overwritten, without waiting.
#
# A block of a sum waits for the others' block of the same index only, whose lines are sent before
# anything waits. The number wraps after 2^32 sums, so a line is mistaken for a new one only if it
# was last written exactly so many sums ago.


BLOCK_WORDS = 256  # two for each thread, whose lines are one store of 16 bytes
WORD_BYTES = 4
LINE_BYTES = 8


@dataclass(frozen=True)
class RankLines:
    """One rank's view of the memory that lines are written to. For each rank it is `[2, ranks,
    capacity]` int64, all 0 before the first sum: buffer, rank that writes, line. `addresses`:
    `[ranks]` int64, where each rank's memory is for this rank. `counts`: `[capacity / BLOCK_WORDS]`
    int32, sums so far of each block, 0 before the first; of this rank."""

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def capacity(self) -> int:
        """The most words of a sum."""
        return self.counts.numel() * BLOCK_WORDS

    @staticmethod
    def num_bytes(ranks: int, capacity: int) -> int:
        """Bytes that each rank's memory needs."""
        return 2 * ranks * capacity * LINE_BYTES


# The sum of all ranks' tensors in one kernel, of which each rank runs one at the same time: every
# rank writes its values into the memory of all others (rank_lines.py), and adds what it finds in
# its own.


DTYPES = (torch.float32, torch.bfloat16)


def serves(values: torch.Tensor, capacity: int) -> bool:
    """Whether `rank_sum` serves these values: it follows from size, dtype and layout, so it is the
    same on all ranks. capacity: the most words of a sum."""
    num_bytes = values.numel() * values.element_size()
    fits = 0 < num_bytes <= capacity * WORD_BYTES and num_bytes % WORD_BYTES == 0
    is_aligned = values.is_contiguous() and values.data_ptr() % WORD_BYTES == 0
    return fits and is_aligned and values.dtype in DTYPES and has_kernels(values.device)


def rank_sum(lines: RankLines, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
    """The sum of all ranks' values in place or, if `add_to` is given, added to that. All ranks add
    in the order of the ranks in float32, and round once before and once after they add to `add_to`:
    the same bits on each. values, add_to: contiguous, of one shape and dtype, which `serves`."""

    assert serves(values, lines.capacity)  # more lines would lie outside of the other ranks' memory
    assert add_to is None or (add_to.shape, add_to.dtype) == (values.shape, values.dtype)
    rank_sum_triton(lines, values, add_to)


def rank_sum_reference(
    parts: Sequence[torch.Tensor], add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """What `rank_sum` computes from the values of all ranks, in their order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    rounded = total.to(parts[0].dtype)
    return rounded if add_to is None else (add_to.float() + rounded.float()).to(add_to.dtype)


# rank_lines.py describes the protocol.


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


@triton.jit
def rank_sum_kernel(
    values: tl.tensor, output: tl.tensor, num_words: tl.tensor, addresses: tl.tensor,
    counts: tl.tensor, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SLOTS: tl.constexpr, ADDS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
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


@triton.jit
def send(
    own: tl.tensor, words: tl.tensor, real: tl.tensor, number: tl.tensor, addresses: tl.tensor,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Writes own words to the lines of all other ranks. `words`: their indices."""
    line = (number.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    ranks = tl.arange(0, SLOTS)
    is_other = (ranks < RANKS) & (ranks != RANK)
    theirs = memory_of(ranks, is_other, addresses, tl.int64)
    place = ((number & 1) * RANKS + RANK) * CAPACITY + words
    mask = is_other[:, None] & real[None, :]
    tl.store(theirs[:, None] + place[None, :], line[None, :], mask=mask)


@triton.jit
def memory_of(
    ranks: tl.tensor, is_wanted: tl.tensor, addresses: tl.tensor, WORD: tl.constexpr
) -> tl.tensor:
    """The memory of ranks. Its alignment is what lets a thread write 16 bytes at a time."""
    found = tl.load(addresses + ranks, mask=is_wanted, other=0)
    return tl.multiple_of(found.to(tl.pointer_type(WORD)), 16)


@triton.jit
def lower(word: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """The float32, or the first of two bfloat16."""
    return (word << 16 if PACKED else word).to(tl.float32, bitcast=True)


@triton.jit
def upper(word: tl.tensor) -> tl.tensor:
    """The second of two bfloat16."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(value: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    return value.to(tl.bfloat16).to(tl.float32) if PACKED else value


@triton.jit
def packed(low: tl.tensor, high: tl.tensor, PACKED: tl.constexpr) -> tl.tensor:
    """The word of one or two values."""
    if PACKED:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        word = first | (second << 16)
    else:
        word = low.to(tl.int32, bitcast=True)
    return word


# The best token among those that all ranks offer, in one kernel, of which each rank runs one at
# the same time: every rank writes its offers into the memory of all others (rank_lines.py).


MAX_TOKEN = torch.iinfo(torch.int32).max


def rank_best(lines: RankLines, offers: torch.Tensor) -> torch.Tensor:
    """The best column of all ranks' offers (`offer_token`): this rank's, contiguous `[R, 2]` int32,
    to `[R]` int64. Ties go to the lowest column; -1 if a rank offers a NaN, or none offers a
    number."""

    assert offers.numel() <= lines.capacity  # more would lie outside of the other ranks' memory
    return rank_best_triton(lines, offers)


def rank_best_reference(offers: torch.Tensor) -> torch.Tensor:
    """`rank_best` of the offers of all ranks, `[R, ranks, 2]`."""
    values = offers[..., 0].contiguous().view(torch.float32)
    is_best = values == values.amax(1, keepdim=True)
    return torch.where(is_best, offers[..., 1], MAX_TOKEN).amin(1).long()


# rank_lines.py describes the protocol.


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


@triton.jit
def rank_best_kernel(
    offers: tl.tensor, tokens: tl.tensor, num_rows: tl.tensor, addresses: tl.tensor,
    counts: tl.tensor, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
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
