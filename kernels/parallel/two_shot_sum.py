"""The sum of all ranks' tensors in two steps of one kernel, for sizes at which it takes long to
send all values to all others: each rank adds a part of the values, and sends its sum to the others.

A rank sends every other rank that one's part of its values, and then raises a flag there. Once it
has the flags of all others it adds its own part in the order of the ranks, sends the sum to all of
them, and raises a second flag (rank_parts.py)."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.parallel.rank_sum import (
    PROGRAMS,
    WORD_BYTES,
    lower,
    memory_of,
    packed,
    serves,
    upper,
)

# The memory in which ranks write each other's parts of values, and their sums (two_shot_sum.py).
#
# A chunk has a part for each rank. Parts are written as they are, half the bytes of lines
# (rank_lines.py). A flag says that they are there: the writer raises it once they have arrived.
#
# Flags are the number of the chunk's sum, a count in device memory, so that replays of a CUDA
# graph go on counting. One buffer is enough. A rank that sends values of sum n has received all
# parts of the chunk's sum n - 1, which the others sent after they had read its values. A rank that
# sends the sum n of its part has received values from all others, which they sent after sum n - 1.
# A program waits only for the other ranks' program of the same index, which sends before it waits.


PART_WORDS = 512  # of a rank in a chunk: four for each thread, which are one store of 16 bytes
FLAG_BYTES = 4


@dataclass(frozen=True)
class RankParts:
    """One rank's view of the memory that parts are written to. For each rank it is `[2, chunks,
    ranks, PART_WORDS]` int32, values and then sums, and `[2, chunks, ranks]` int32, their flags,
    all 0 before the first sum; the index of a rank is that of the writer. `addresses`: `[ranks]`
    int64, where each rank's memory is for this rank. `counts`: `[chunks]` int32, sums so far of
    each chunk, 0 before the first; of this rank."""

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def capacity(self) -> int:
        """The most words of a sum."""
        return self.counts.numel() * self.addresses.numel() * PART_WORDS

    @staticmethod
    def num_bytes(ranks: int, chunks: int) -> int:
        """Bytes that each rank's memory needs."""
        return 2 * chunks * ranks * (PART_WORDS * WORD_BYTES + FLAG_BYTES)


def two_shot_sum(
    parts: RankParts, values: torch.Tensor, add_to: torch.Tensor | None = None
) -> None:
    """As `rank_sum`, with the same bits."""

    assert serves(values, parts.capacity)  # more would lie outside of the other ranks' memory
    assert add_to is None or (add_to.shape, add_to.dtype) == (values.shape, values.dtype)
    two_shot_sum_triton(parts, values, add_to)


# rank_parts.py describes the protocol.


def two_shot_sum_triton(
    parts: RankParts, values: torch.Tensor, add_to: torch.Tensor | None = None
) -> None:
    """See `two_shot_sum`."""
    output = values if add_to is None else add_to
    num_words = values.numel() * values.element_size() // WORD_BYTES
    ranks = parts.addresses.numel()
    two_shot_sum_kernel[(min(triton.cdiv(num_words, ranks * PART_WORDS), PROGRAMS),)](
        values.view(-1).view(torch.int32),
        output.view(-1).view(torch.int32),
        num_words,
        parts.addresses,
        parts.counts,
        CHUNKS=parts.counts.numel(),
        RANK=parts.rank,
        RANKS=ranks,
        SLOTS=triton.next_power_of_2(ranks),
        ADDS=add_to is not None,
        PACKED=values.dtype == torch.bfloat16,
        PART=PART_WORDS,
        FENCES=values.is_cuda,
        num_warps=4,
        **programmatic_launch(values.device),
    )


@triton.jit
def two_shot_sum_kernel(
    values: tl.tensor, output: tl.tensor, num_words: tl.tensor, addresses: tl.tensor,
    counts: tl.tensor, CHUNKS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SLOTS: tl.constexpr, ADDS: tl.constexpr, PACKED: tl.constexpr, PART: tl.constexpr,
    FENCES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (programs), each of which has every so-many-th chunk. It sends the values of all of them
    before it waits for any. SLOTS: RANKS or more. PACKED: a word is two bfloat16."""
    begin(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    num_chunks = tl.cdiv(num_words, RANKS * PART)
    of_part, ranks = tl.arange(0, PART), tl.arange(0, SLOTS)
    is_other = (ranks < RANKS) & (ranks != RANK)
    near = tl.where(is_other, ranks, (RANK + 1) % RANKS)  # another rank's, also in unused slots
    theirs = memory_of(ranks, is_other, addresses, tl.int32)
    mine = memory_of(RANK, True, addresses, tl.int32)
    summed: tl.constexpr = CHUNKS * RANKS * PART  # where sums are, after values
    flags: tl.constexpr = 2 * CHUNKS * RANKS * PART
    for chunk in range(first, num_chunks, step):
        words = (chunk * RANKS + ranks[:, None]) * PART + of_part[None, :]
        real = is_other[:, None] & (words < num_words)
        place = theirs[:, None] + ((chunk * RANKS + RANK) * PART + of_part)[None, :]
        tl.store(place, tl.load(values + words, mask=real, other=0), mask=real)
        number = tl.load(counts + chunk) + 1
        raise_flags(theirs + flags + chunk * RANKS + RANK, is_other, number, FENCES)
    for chunk in range(first, num_chunks, step):
        words = (chunk * RANKS + RANK) * PART + of_part
        real = words < num_words
        own = tl.load(values + words, mask=real, other=0)
        before = start_of(output + words, real, ADDS)
        number = tl.load(counts + chunk) + 1
        wait_for(mine + flags + chunk * RANKS + near, number, FENCES)
        received = mine + chunk * RANKS * PART + of_part
        total = own_part(own, received, real, RANK, RANKS, PACKED, PART)
        place = theirs[:, None] + summed + words[None, :]
        tl.store(place, total[None, :], mask=is_other[:, None] & real[None, :])
        place = theirs + flags + (CHUNKS + chunk) * RANKS + RANK
        raise_flags(place, is_other, number, FENCES)
        tl.store(output + words, added(before, total, ADDS, PACKED), mask=real)
    for chunk in range(first, num_chunks, step):
        words = (chunk * RANKS + ranks[:, None]) * PART + of_part[None, :]
        real = is_other[:, None] & (words < num_words)
        before = start_of(output + words, real, ADDS)
        number = tl.load(counts + chunk) + 1
        wait_for(mine + flags + (CHUNKS + chunk) * RANKS + near, number, FENCES)
        total = tl.load(mine + summed + words, mask=real, other=0)
        tl.store(output + words, added(before, total, ADDS, PACKED), mask=real)
        tl.store(counts + chunk, number)


@triton.jit
def own_part(
    own: tl.tensor, received: tl.tensor, real: tl.tensor, RANK: tl.constexpr, RANKS: tl.constexpr,
    PACKED: tl.constexpr, PART: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum of a part, in the order of the ranks."""
    low = tl.zeros([PART], tl.float32)
    high = tl.zeros([PART], tl.float32)
    for source in tl.static_range(RANKS):
        word = own
        if source != RANK:
            word = tl.load(received + source * PART, mask=real, other=0)
        low, high = low + lower(word, PACKED), high + upper(word)
    return packed(low, high, PACKED)


@triton.jit
def raise_flags(
    flags: tl.tensor, is_other: tl.tensor, number: tl.tensor, FENCES: tl.constexpr
) -> None:
    """Once what all threads have written has arrived."""
    if FENCES:
        text: tl.constexpr = "fence.acq_rel.sys; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.store(flags, number, mask=is_other)


@triton.jit
def wait_for(flags: tl.tensor, number: tl.tensor, FENCES: tl.constexpr) -> None:
    """Until all flags have the number; then all threads may read what was written before."""
    found = raised(flags, FENCES)
    while tl.max((found != number).to(tl.int32), 0) != 0:
        found = raised(flags, FENCES)
    tl.debug_barrier()


@triton.jit
def raised(flags: tl.tensor, FENCES: tl.constexpr) -> tl.tensor:
    if FENCES:
        text: tl.constexpr = "ld.acquire.sys.global.b32 $0, [$1];"
        found = tl.inline_asm_elementwise(
            text, "=r,l", [flags], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        found = tl.load(flags, volatile=True)
    return found


@triton.jit
def start_of(output: tl.tensor, real: tl.tensor, ADDS: tl.constexpr) -> tl.tensor:
    """The words that the sum is added to, if it is added to any."""
    return tl.load(output, mask=real, other=0) if ADDS else tl.zeros(real.shape, tl.int32)


@triton.jit
def added(
    before: tl.tensor, total: tl.tensor, ADDS: tl.constexpr, PACKED: tl.constexpr
) -> tl.tensor:
    if ADDS:
        low = lower(before, PACKED) + lower(total, PACKED)
        total = packed(low, upper(before) + upper(total), PACKED)
    return total
