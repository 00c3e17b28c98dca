"""Sorts the tokens of a mixture of experts by expert, in blocks for a grouped GEMM: a Triton kernel
if Triton is available, otherwise the plain-torch reference, which is the definition.

Shapes follow from the number of tokens, and the host never waits, so CUDA graphs can hold it."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel

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

    def experts_of_rows(self, number: int) -> torch.Tensor:
        """The expert of each sorted row, of the `number` that the rank has, `[P]` int64; any of
        them for a row of another rank."""
        return (self.experts.flatten()[self.order] - self.first).clamp_(0, number - 1).long()


def max_blocks(num_assignments: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that so many assignments can need."""
    return min(num_assignments, num_assignments // block_rows + min(num_experts, num_assignments))


@with_kernel("moe_permute_triton.moe_permute_triton")
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
