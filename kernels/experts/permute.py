"""Sorts the tokens of a mixture of experts by expert, in blocks for a grouped GEMM: a Triton kernel
if Triton is available, otherwise the plain-torch reference, which is the definition.

Shapes follow from the number of tokens, and the host never waits, so CUDA graphs can hold it."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

# Many assignments are placed by chunks, in steps.
CHUNK, STEP = 512, 64


@dataclass(frozen=True)
class ExpertRows:
    """The P = T * k assignments of tokens to experts, sorted by expert. Assignment `t * k + j` is
    token t's j-th expert; those of an expert keep their order. Those of other ranks' experts come
    last, in no block."""

    order: torch.Tensor
    """`[P]` int32: the assignment at each sorted row."""
    blocks: torch.Tensor
    """`[3, max_blocks]` int32: each block's expert, first sorted row, and the end of its expert's
    rows. A block has up to `block_rows` rows of one expert. Only `num_blocks` are defined."""
    num_blocks: torch.Tensor
    """`[1]` int32."""
    block_rows: int
    top_k: int
    experts: torch.Tensor
    """`[T, k]` int32: the experts of each token, of all ranks."""
    first: int = 0
    """The rank's first expert, which `blocks` call 0."""
    is_sorted: bool = True
    """False: assignments keep their order, and each is a block."""

    def experts_of_rows(self, number: int) -> torch.Tensor:
        """The expert of each sorted row, of the `number` that the rank has, `[P]` int64; any of
        them for a row of another rank."""
        return (self.experts.flatten()[self.order] - self.first).clamp_(0, number - 1).long()


def max_blocks(num_assignments: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that so many assignments can need."""
    return min(num_assignments, num_assignments // block_rows + min(num_experts, num_assignments))


@with_kernel("moe_permute_triton")
def moe_permute(
    experts: torch.Tensor, num_experts: int, block_rows: int, first: int | None = None
) -> ExpertRows:
    """Sorts the assignments by expert, in blocks of one expert each.

    Args:
        experts: `[T, k]` int32, contiguous.
        num_experts: how many experts this rank has.
        block_rows: the most rows of a block.
        first: the first expert of this rank; None: it has all experts.
    """
    flat = experts.flatten().long() - (first or 0)
    flat = flat.where((flat >= 0) & (flat < num_experts), num_experts)
    counts = flat.bincount(minlength=num_experts)[:num_experts]
    ends = counts.cumsum(0)
    blocks_by_expert = (counts + block_rows - 1) // block_rows
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(blocks_by_expert)
    earlier = blocks_by_expert.cumsum(0) - blocks_by_expert
    index = torch.arange(len(owners), device=flat.device) - earlier[owners]
    first_rows = (ends - counts)[owners] + index * block_rows
    blocks = torch.stack((owners, first_rows, ends[owners])).to(torch.int32)
    room = max_blocks(len(flat), num_experts, block_rows) - len(owners)
    return ExpertRows(
        order=flat.argsort(stable=True).to(torch.int32),
        blocks=torch.nn.functional.pad(blocks, (0, room)),
        num_blocks=blocks_by_expert.sum().to(torch.int32)[None],
        block_rows=block_rows,
        top_k=experts.shape[1],
        experts=experts,
        first=first or 0,
    )


# For few assignments a program per expert reads them all: it finds where its expert's rows begin
# without waiting for another program. Many are counted chunk by chunk; sums over chunks and
# experts then say where each chunk's rows of an expert begin.


# Assignments that a program reads at a time, and blocks that it writes.
MIN_READ, MAX_READ, MAX_WRITTEN = 128, 4096, 64


def moe_permute_triton(
    experts: torch.Tensor, num_experts: int, block_rows: int, first: int | None = None
) -> ExpertRows:
    """See `moe_permute`."""
    assert experts.is_contiguous() and experts.dtype == torch.int32
    number = experts.numel()
    room = max_blocks(number, num_experts, block_rows)
    order, blocks = experts.new_empty(number), experts.new_empty(3, room)
    rows = ExpertRows(
        order, blocks, experts.new_empty(1), block_rows, experts.shape[1], experts, first or 0
    )
    programs = num_experts + (first is not None)  # the last one has those of other ranks
    bins = max(32, 1 << (programs - 1).bit_length())
    own = {"FIRST": first, "NUMBER": num_experts, "BINS": bins}
    totals = _place_by_chunks(experts, order, bins, own) if number > MAX_READ else None
    block = min(max(MIN_READ, 1 << (number - 1).bit_length()), MAX_READ)
    moe_permute_kernel[(programs,)](
        experts,
        totals,
        rows.order,
        rows.blocks,
        rows.num_blocks,
        number,
        room,
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        BLOCKS=MAX_WRITTEN,
        num_warps=1 if totals is not None else max(1, min(block // 256, 8)),
        **own,
        **programmatic_launch(experts.device),
    )
    return rows


def _place_by_chunks(
    experts: torch.Tensor, order: torch.Tensor, bins: int, own: dict[str, int | None]
) -> torch.Tensor:
    """Fills `order`; returns how many assignments each expert has, `[bins]` int32. own: arguments
    of the kernels."""
    number, pdl = experts.numel(), programmatic_launch(experts.device)
    chunks = -(-number // CHUNK)
    counts = experts.new_empty(chunks, bins)
    count_chunk_kernel[(chunks,)](experts, counts, number, CHUNK=CHUNK, num_warps=4, **own, **pdl)
    ends = counts.cumsum(0, dtype=torch.int32)
    place_chunk_kernel[(chunks,)](
        experts,
        counts,
        ends,
        order,
        number,
        chunks - 1,
        CHUNK=CHUNK,
        STEP=STEP,
        num_warps=8,
        **own,
        **pdl,
    )
    return ends[-1]


@triton.jit
def _own(experts: tl.tensor, FIRST: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """The rank's number of each expert; NUMBER for those of other ranks."""
    if FIRST is not None:
        experts -= FIRST
        experts = tl.where((experts >= 0) & (experts < NUMBER), experts, NUMBER)
    return experts


@triton.jit(do_not_specialize=["number", "room"])
def moe_permute_kernel(
    experts: tl.tensor, totals: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    num_blocks: tl.tensor, number: tl.tensor, room: tl.tensor, BLOCK_ROWS: tl.constexpr,
    FIRST: tl.constexpr, NUMBER: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (experts, and one more if FIRST is not None). With `totals` `[BINS]`, the counts of all
    experts, only the blocks are written."""
    begin(PDL)
    expert, bins = tl.program_id(0), tl.arange(0, BINS)
    if totals is not None:
        counts = tl.load(totals + bins)
    else:
        counts = tl.zeros([BINS], tl.int32)
        for start in tl.range(0, number, BLOCK):
            assignments = start + tl.arange(0, BLOCK)
            ids = tl.load(experts + assignments, mask=assignments < number, other=0)
            counts += tl.histogram(_own(ids, FIRST, NUMBER), BINS)
        # What was read past the end was counted as expert 0.
        past = tl.cdiv(number, BLOCK) * BLOCK - number
        counts -= tl.where(bins == _own(expert * 0, FIRST, NUMBER), past, 0)
    needed = tl.where(bins < NUMBER, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(needed, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), 0)

    first_block = tl.sum(tl.where(bins < expert, needed, 0), 0)
    own_blocks = tl.where(expert < NUMBER, tl.cdiv(end - first, BLOCK_ROWS), 0)
    for start in tl.range(0, own_blocks, BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        own = blocks + first_block + index
        first_rows = first + index * BLOCK_ROWS
        used = first_rows < end
        tl.store(own, tl.zeros([BLOCKS], tl.int32) + expert, mask=used)
        tl.store(own + room, first_rows, mask=used)
        tl.store(own + 2 * room, tl.zeros([BLOCKS], tl.int32) + end, mask=used)

    if totals is None and end > first:
        for start in tl.range(0, number, BLOCK):
            assignments = start + tl.arange(0, BLOCK)
            real = assignments < number
            ids = _own(tl.load(experts + assignments, mask=real, other=0), FIRST, NUMBER)
            mine = (real & (ids == expert)).to(tl.int32)
            rows = first + tl.cumsum(mine, 0) - 1
            tl.store(order + rows, assignments, mask=mine != 0)
            first += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["number"])
def count_chunk_kernel(
    experts: tl.tensor, counts: tl.tensor, number: tl.tensor, FIRST: tl.constexpr,
    NUMBER: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (chunks): `counts` `[chunks, BINS]`."""
    begin(PDL)
    chunk, bins = tl.program_id(0), tl.arange(0, BINS)
    assignments = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(experts + assignments, mask=assignments < number, other=0)
    past = tl.maximum((chunk + 1) * CHUNK - number, 0)
    found = tl.histogram(_own(ids, FIRST, NUMBER), BINS)
    found -= tl.where(bins == _own(chunk * 0, FIRST, NUMBER), past, 0)
    tl.store(counts + chunk * BINS + bins, found)


@triton.jit(do_not_specialize=["number", "last"])
def place_chunk_kernel(
    experts: tl.tensor, counts: tl.tensor, ends: tl.tensor, order: tl.tensor, number: tl.tensor,
    last: tl.tensor, FIRST: tl.constexpr, NUMBER: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (chunks), of which `last` is the last one. `ends`: sums of `counts` over the chunks up
    to each."""
    begin(PDL)
    chunk, bins = tl.program_id(0), tl.arange(0, BINS)
    totals = tl.load(ends + last * BINS + bins)
    own = chunk * BINS + bins
    first = tl.cumsum(totals, 0) - totals + tl.load(ends + own) - tl.load(counts + own)
    for start in tl.range(0, CHUNK, STEP):
        assignments = chunk * CHUNK + start + tl.arange(0, STEP)
        real = assignments < number
        ids = _own(tl.load(experts + assignments, mask=real, other=0), FIRST, NUMBER)
        is_of = (ids[:, None] == bins[None, :]).to(tl.int32)
        rows = tl.sum(is_of * (first[None, :] + tl.cumsum(is_of, 0) - 1), 1)
        tl.store(order + rows, assignments, mask=real)
        first += tl.sum(is_of, 0)
