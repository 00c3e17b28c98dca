"""Row metadata of generation windows: positions, KV slots, and the pages that attention reads. On
CUDA one Triton kernel instead of eleven launches per forward, elsewhere the plain-torch reference.
"""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel


@dataclass(frozen=True)
class WindowRows:
    """The rows of B windows of W tokens: positions and kv_slots `[B * W]` int64, kv_lens `[B]`
    int32 including the window, block_tables `[B, P]` int32. With a tree the positions are not those
    of the slots."""

    positions: torch.Tensor
    kv_slots: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor


@with_kernel("window_rows_triton.window_rows_triton")
def window_rows(
    table: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    width: int,
    num_pages: int,
    page_size: int,
    depths: torch.Tensor | None = None,
    offset: int = 0,
) -> WindowRows:
    """table `[S, P_max]` int32; slots and first `[B]` int64: the windows' slots and first
    positions. The first `num_pages` pages of a row must cover its window.

    With `depths` `[B, W]` int64, contiguous, the rows are of a tree that starts at `first`: their
    positions are first + depths, and their KV comes after the tree's first `offset` keys."""
    keys = first.unsqueeze(1) + torch.arange(offset, offset + width, device=first.device)
    positions = keys if depths is None else first.unsqueeze(1) + depths
    block_tables = table[:, :num_pages].index_select(0, slots)
    pages = block_tables.gather(1, keys // page_size).to(torch.int64)
    kv_slots = pages * page_size + keys % page_size
    kv_lens = (first + (offset + width)).to(torch.int32)
    return WindowRows(positions.flatten(), kv_slots.flatten(), kv_lens, block_tables)
