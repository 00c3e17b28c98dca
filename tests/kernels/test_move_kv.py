"""Moving an accepted path's keys and values to the front of its window."""

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tllm_spec.kernels.attention.move_kv import move_kv

PAGE_SIZE = 4


def problem(
    batch: int, layers: int, width: int, dtype: torch.dtype, depth: int, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request has pages of its own; page 0 is the dummy page."""
    generator = torch.Generator().manual_seed(batch + width + depth)
    pages = -(-(2 * PAGE_SIZE + window) // PAGE_SIZE)
    planes = torch.randint(-99, 99, (layers, batch * pages + 1, PAGE_SIZE, width))
    tables = (torch.randperm(batch * pages, generator=generator) + 1).view(batch, pages)
    first = torch.randint(0, 2 * PAGE_SIZE, (batch,), generator=generator)
    rows, lens = torch.zeros(batch, depth + 1, dtype=torch.int64), torch.ones(batch)
    for request in range(batch):
        number = int(torch.randint(0, depth + 1, (1,), generator=generator))
        path = torch.randperm(window - 1, generator=generator)[:number].sort().values + 1
        if request % 3 == 2:
            path = torch.arange(1, number + 1)
        rows[request, 1 : number + 1] = path
        rows[request, number + 1 :] = rows[request, number]
        lens[request] = number + 1
    return planes.to(dtype), tables.to(torch.int32), first, rows, lens.to(torch.int64)


def moved_slowly(
    planes: torch.Tensor,
    tables: torch.Tensor,
    first: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    result = planes.clone()
    for request, (start, number) in enumerate(zip(first.tolist(), lens.tolist(), strict=True)):
        for to_row, from_row in enumerate(rows[request, :number].tolist()):
            to_index, from_index = start + to_row, start + from_row
            to_page, from_page = (
                int(tables[request, index // PAGE_SIZE]) for index in (to_index, from_index)
            )
            result[:, to_page, to_index % PAGE_SIZE] = planes[:, from_page, from_index % PAGE_SIZE]
    return result


@pytest.mark.parametrize(("depth", "window"), [(0, 1), (3, 6), (6, 64)])
def test_the_path_is_copied_to_the_front_and_nothing_else(depth: int, window: int) -> None:
    planes, *where = problem(7, 3, 2, torch.float32, depth, window)
    expected = moved_slowly(planes, *where)
    assert (depth == 0) == torch.equal(expected, planes)
    move_kv.reference(planes, *where)
    assert torch.equal(planes, expected)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("depth", "window"), [(0, 1), (3, 6), (6, 64)])
@pytest.mark.parametrize("width", [4, 96])
def test_the_kernel_moves_what_the_reference_moves(
    device: str, dtype: torch.dtype, depth: int, window: int, width: int
) -> None:
    planes, *where = problem(5, 2, width, dtype, depth, window)
    there = planes.to(device, copy=True)
    move_kv(there, *(each.to(device) for each in where))
    expected = moved_slowly(planes.view(torch.uint8), *where)
    assert torch.equal(there.cpu().view(torch.uint8), expected)


@on_each_kernel_device
@pytest.mark.skipif(INTERPRETED, reason="too slow there")
def test_the_kernel_moves_real_sizes(device: str) -> None:
    planes, *where = problem(64, 64, 1024, torch.bfloat16, 6, 64)
    there = planes.to(device, copy=True)
    move_kv(there, *(each.to(device) for each in where))
    assert torch.equal(there.cpu(), moved_slowly(planes, *where))
