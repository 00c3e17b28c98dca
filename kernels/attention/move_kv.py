"""Moves the keys and values of an accepted path to the front of its window, in all layers of a
paged pool: one Triton kernel if Triton is available, otherwise the plain-torch reference."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch


@with_kernel("move_kv_triton")
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


# A program has a part of each of a path's tokens, and reads all of them before it writes any. The
# elements are copied as 32-bit words, whatever their type is.


_WORDS = 4096  # per program, at most: 32 per thread


def move_kv_triton(
    planes: torch.Tensor,
    block_tables: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """See `move_kv`. A token of a plane has a multiple of 4 bytes."""
    assert planes.is_contiguous() and block_tables.stride(1) == 1
    assert first.is_contiguous() and lens.is_contiguous() and rows.stride(1) == 1
    words = planes.view(torch.int32)
    num_planes, _, page_size, width = words.shape
    steps = triton.next_power_of_2(rows.shape[1])
    block = min(triton.next_power_of_2(width), max(_WORDS // steps, 1))
    move_kv_kernel[(len(first), num_planes, triton.cdiv(width, block))](
        words,
        words.stride(0),
        block_tables,
        block_tables.stride(0),
        first,
        rows,
        rows.stride(0),
        lens,
        page_size,
        width,
        steps,
        block,
        **programmatic_launch(planes.device),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["table_stride", "rows_stride"])
def move_kv_kernel(
    planes: tl.tensor, plane_stride: tl.tensor, block_tables: tl.tensor, table_stride: tl.tensor,
    all_first: tl.tensor, rows: tl.tensor, rows_stride: tl.tensor, lens: tl.tensor,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (requests, planes, parts of a token)."""
    begin(PDL)
    request, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    steps = tl.arange(0, STEPS)
    is_moved = steps < tl.load(lens + request)
    row = tl.load(rows + request * rows_stride + steps, mask=is_moved, other=0)
    is_moved = is_moved & (row != steps)
    if tl.max(is_moved.to(tl.int32), axis=0) == 0:
        return
    first, table = tl.load(all_first + request), block_tables + request * table_stride
    from_slots = _block_slots(table, first + row, is_moved, PAGE_SIZE)
    to_slots = _block_slots(table, first + steps, is_moved, PAGE_SIZE)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = is_moved[:, None] & (columns < WIDTH)[None, :]
    plane_start = planes + plane * plane_stride
    words = tl.load(plane_start + from_slots[:, None] * WIDTH + columns[None, :], mask=mask)
    tl.debug_barrier()  # a destination may be another thread's source
    tl.store(plane_start + to_slots[:, None] * WIDTH + columns[None, :], words, mask=mask)


@triton.jit
def _block_slots(
    table: tl.tensor, indices: tl.tensor, mask: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    pages = tl.load(table + indices // PAGE_SIZE, mask=mask, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
