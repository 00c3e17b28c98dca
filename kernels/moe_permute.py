"""Sorts the tokens of a mixture of experts by expert, in blocks for a grouped GEMM: a Triton kernel
if Triton is available, otherwise the plain-torch reference, which is the definition.

Shapes follow from the number of tokens, and the host never waits, so CUDA graphs can hold it."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.triton_support import has_kernels

# Assignments that a program reads at a time, and blocks that it writes.
MIN_READ, MAX_READ, MAX_WRITTEN = 128, 4096, 64
# More assignments than MAX_READ are placed by chunks, in steps.
CHUNK, STEP = 512, 64


@dataclass(frozen=True)
class ExpertRows:
    """The P = T * k assignments of tokens to experts, sorted by expert. Assignment `t * k + j` is
    token t's j-th expert; those of an expert keep their order."""

    order: torch.Tensor
    """`[P]` int32: the assignment at each sorted row."""
    blocks: torch.Tensor
    """`[3, max_blocks]` int32: each block's expert, first sorted row, and the end of its expert's
    rows. A block has up to `block_rows` rows of one expert. Only `num_blocks` are defined."""
    num_blocks: torch.Tensor
    """`[1]` int32."""
    block_rows: int
    top_k: int


def max_blocks(num_assignments: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that so many assignments can need."""
    return min(num_assignments, num_assignments // block_rows + min(num_experts, num_assignments))


def moe_permute(experts: torch.Tensor, num_experts: int, block_rows: int) -> ExpertRows:
    """experts: `[T, k]` int32, contiguous, each below `num_experts`."""
    if not has_kernels(experts.device):
        return plain_moe_permute(experts, num_experts, block_rows)
    from tllm_spec.kernels.moe_permute_triton import moe_permute_kernel

    assert experts.is_contiguous() and experts.dtype == torch.int32
    number = experts.numel()
    room = max_blocks(number, num_experts, block_rows)
    order, blocks = experts.new_empty(number), experts.new_empty(3, room)
    rows = ExpertRows(order, blocks, experts.new_empty(1), block_rows, experts.shape[1])
    bins = max(32, 1 << (num_experts - 1).bit_length())
    totals = _place_by_chunks(experts, order, bins) if number > MAX_READ else None
    block = min(max(MIN_READ, 1 << (number - 1).bit_length()), MAX_READ)
    moe_permute_kernel[(num_experts,)](
        experts,
        totals,
        rows.order,
        rows.blocks,
        rows.num_blocks,
        number,
        room,
        BLOCK_ROWS=block_rows,
        BINS=bins,
        BLOCK=block,
        BLOCKS=MAX_WRITTEN,
        num_warps=1 if totals is not None else max(1, min(block // 256, 8)),
        **programmatic_launch(experts.device),
    )
    return rows


def _place_by_chunks(experts: torch.Tensor, order: torch.Tensor, bins: int) -> torch.Tensor:
    """Fills `order`; returns how many assignments each expert has, `[bins]` int32."""
    from tllm_spec.kernels.moe_permute_triton import count_chunk_kernel, place_chunk_kernel

    number, pdl = experts.numel(), programmatic_launch(experts.device)
    chunks = -(-number // CHUNK)
    counts = experts.new_empty(chunks, bins)
    count_chunk_kernel[(chunks,)](
        experts, counts, number, BINS=bins, CHUNK=CHUNK, num_warps=4, **pdl
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    place_chunk_kernel[(chunks,)](
        experts,
        counts,
        ends,
        order,
        number,
        chunks - 1,
        BINS=bins,
        CHUNK=CHUNK,
        STEP=STEP,
        num_warps=8,
        **pdl,
    )
    return ends[-1]


def plain_moe_permute(experts: torch.Tensor, num_experts: int, block_rows: int) -> ExpertRows:
    """Reference of `moe_permute`."""
    flat = experts.flatten().long()
    counts = flat.bincount(minlength=num_experts)
    ends = counts.cumsum(0)
    blocks_by_expert = (counts + block_rows - 1) // block_rows
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(blocks_by_expert)
    earlier = blocks_by_expert.cumsum(0) - blocks_by_expert
    index = torch.arange(len(owners), device=flat.device) - earlier[owners]
    first = (ends - counts)[owners] + index * block_rows
    blocks = torch.stack((owners, first, ends[owners])).to(torch.int32)
    room = max_blocks(len(flat), num_experts, block_rows) - len(owners)
    return ExpertRows(
        order=flat.argsort(stable=True).to(torch.int32),
        blocks=torch.nn.functional.pad(blocks, (0, room)),
        num_blocks=blocks_by_expert.sum().to(torch.int32)[None],
        block_rows=block_rows,
        top_k=experts.shape[1],
    )
