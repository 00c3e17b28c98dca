"""What accepted paths show about the children of their nodes: which child came next, and how many
were rejected (rank_codes.py). On CUDA a Triton kernel, elsewhere the plain-torch reference."""

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.rank_codes import END, NOTHING, OFF_CHAIN


@with_kernel("path_ranks_triton.path_ranks_triton")
def path_ranks(
    parents: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Ranks of the paths that `accept_trees` has accepted, `[B, D+1]` int64.

    Args:
        parents: `[S, >= W]` int64 by slot, as in `accept_trees`.
        slots: `[B]` int64.
        num_drafts: `[B]` int64: nodes that were proposed, as before acceptance.
        rows, lens: `[B, D+1]` and `[B]`, the accepted rows and their numbers.
        width: W, rows of a window.
    """
    nodes = torch.arange(width, device=rows.device)
    is_draft = (nodes > 0) & (nodes <= num_drafts.unsqueeze(1))  # [B, W]
    own = parents.index_select(0, slots)[:, :width]
    is_child = (own.unsqueeze(1) == rows.unsqueeze(2)) & is_draft.unsqueeze(1)  # [B, D+1, W]
    next_rows = rows.roll(-1, dims=1).unsqueeze(2)
    ranks = (is_child & (nodes < next_rows)).sum(dim=2)
    columns, last = torch.arange(rows.shape[1], device=rows.device), lens.unsqueeze(1) - 1
    # A path as long as a round may emit had no children to try.
    tried = torch.where(columns == rows.shape[1] - 1, 0, is_child.sum(dim=2))
    found = torch.where(columns < last, ranks, END + tried)
    strayed = ((ranks > 0) & (columns < last)).cumsum(dim=1)
    found = found + OFF_CHAIN * (strayed.roll(1, dims=1).masked_fill(columns == 0, 0) > 0)
    return found.masked_fill(columns > last, NOTHING)
