"""Moves the keys and values of an accepted path to the front of its window, in all layers of a
paged pool: one Triton kernel if Triton is available, otherwise the plain-torch reference."""

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("move_kv_triton.move_kv_triton")
def move_kv(
    planes: torch.Tensor,
    block_tables: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Copies the token at index `first[b] + rows[b, i]` of request b to `first[b] + i`, for
    i < lens[b]. Requests whose path is 0, 1, 2 and so on are left alone.

    Args:
        planes: `[L, pages, page_size, width]`, contiguous: the keys of a layer, its values, or what
            else it has. A view of a pool, e.g. `pool.data.flatten(0, 1).flatten(3)`.
        block_tables: `[B, P]` int32, any stride between rows.
        first: `[B]` int64: index of the window's first token.
        rows: `[B, D+1]` int64, from 0 on, rising in each of the first `lens` columns; so
            rows[b, i] >= i. Sources and destinations may overlap.
        lens: `[B]` int64, 1 to D+1.
    """
    steps = torch.arange(rows.shape[1], device=rows.device)
    is_moved = steps < lens.unsqueeze(1)
    sources = first.unsqueeze(1) + rows * is_moved
    destinations = first.unsqueeze(1) + steps * is_moved
    slots = planes.flatten(1, 2)
    from_slots = _slots(sources, block_tables, planes.shape[2])
    to_slots = _slots(destinations, block_tables, planes.shape[2])
    slots.index_copy_(1, to_slots, slots.index_select(1, from_slots))


def _slots(indices: torch.Tensor, block_tables: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = block_tables.gather(1, indices // page_size).to(torch.int64)
    return (pages * page_size + indices % page_size).flatten()
