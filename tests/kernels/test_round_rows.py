"""Which rows belong to which request, and the row metadata of windows."""

from dataclasses import fields

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.row_counts import ragged_rows
from tllm_spec.kernels.slots.round_rows import RoundRows, window_rows

COUNTS = (1, 3, 2, 3, 1)


def test_values_of_requests_are_repeated_for_their_rows() -> None:
    values = torch.arange(5)
    expected = values.repeat_interleave(torch.tensor(COUNTS))
    assert torch.equal(ragged_rows(COUNTS, 3).expand(values), expected)


def test_rows_take_their_part_of_whole_windows_and_the_last_row_stands_for_missing_ones() -> None:
    rows = ragged_rows(COUNTS, 3)
    taken = rows.flat(torch.arange(15).view(5, 3))
    assert taken.tolist() == [0, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    whole = [[0, 0, 0], [3, 4, 5], [6, 7, 7], [9, 10, 11], [12, 12, 12]]
    assert rows.padded(taken).tolist() == whole
    assert [rows.column(taken, i).tolist() for i in range(3)] == torch.tensor(whole).T.tolist()


def test_equal_counts_give_what_a_rectangle_gives() -> None:
    ragged, rectangle = ragged_rows((3, 3), 3), RoundRows.rectangle(2, 3)
    values, windows = torch.randn(6, 4), torch.randn(2, 3, 4)
    assert ragged.num_rows == rectangle.num_rows
    for mine, its in (
        (ragged.expand(windows), rectangle.expand(windows)),
        (ragged.flat(windows), rectangle.flat(windows)),
        (ragged.padded(values), rectangle.padded(values)),
        (ragged.column(values, 1), rectangle.column(values, 1)),
        (values[:2, 0] + ragged.counts, values[:2, 0] + rectangle.counts),
    ):
        assert torch.equal(mine, its)


def test_a_window_crosses_into_the_next_page() -> None:
    table = torch.tensor([[7, 9, 4], [5, 6, 8]], dtype=torch.int32)
    rows = window_rows(table, torch.tensor([1, 0]), torch.tensor([3, 0]), 3, 2, 4)
    assert rows.positions.tolist() == [3, 4, 5, 0, 1, 2]
    assert rows.kv_slots.tolist() == [5 * 4 + 3, 6 * 4, 6 * 4 + 1, 28, 29, 30]
    assert rows.kv_lens.tolist() == [6, 3]
    assert rows.block_tables.tolist() == [[5, 6], [7, 9]]


def test_rows_of_a_tree_have_positions_by_depth_and_slots_after_the_offset() -> None:
    table = torch.tensor([[7, 9, 4], [5, 6, 8]], dtype=torch.int32)
    depths = torch.tensor([[1, 2, 2], [0, 1, 1]])
    rows = window_rows(table, torch.tensor([1, 0]), torch.tensor([3, 0]), 3, 2, 4, depths, 2)
    assert rows.positions.tolist() == [4, 5, 5, 0, 1, 1]
    assert rows.kv_slots.tolist() == [6 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 7 * 4 + 2, 7 * 4 + 3, 9 * 4]
    assert rows.kv_lens.tolist() == [8, 5]


@on_each_kernel_device
@pytest.mark.parametrize("offset", [None, 0, 5], ids=["chain", "tree", "later draft step"])
@pytest.mark.parametrize(
    ("num_pages", "page_size", "width"), [(1, 16, 1), (5, 16, 4), (37, 32, 7), (2100, 8, 3)]
)
def test_the_kernel_computes_the_same_rows_as_the_reference(
    device: str, num_pages: int, page_size: int, width: int, offset: int | None
) -> None:
    generator = torch.Generator().manual_seed(num_pages)
    table = torch.randint(0, 10**6, (11, num_pages + 3), generator=generator, dtype=torch.int32)
    slots = torch.randperm(11, generator=generator)[:7]
    last = num_pages * page_size - width - (offset or 0)
    first = torch.randint(0, last + 1, (7,), generator=generator)
    first[0], first[1] = 0, last
    depths, sizes = None, (width, num_pages, page_size)
    if offset is not None:
        depths = torch.randint(0, 64, (7, width), generator=generator)
    expected = window_rows.reference(table, slots, first, *sizes, depths, offset or 0)
    if depths is not None:
        depths = depths.to(device)
    on_device = table.to(device), slots.to(device), first.to(device)
    found = window_rows(*on_device, *sizes, depths, offset or 0)
    for each in fields(found):
        own, wanted = getattr(found, each.name).cpu(), getattr(expected, each.name)
        assert own.dtype == wanted.dtype and torch.equal(own, wanted), each.name
