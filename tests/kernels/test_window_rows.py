"""Row metadata of windows: a small example, and the kernel against its reference."""

from dataclasses import fields

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.window_rows import window_rows, window_rows_reference


def test_a_window_crosses_into_the_next_page() -> None:
    table = torch.tensor([[7, 9, 4], [5, 6, 8]], dtype=torch.int32)
    rows = window_rows(table, torch.tensor([1, 0]), torch.tensor([3, 0]), 3, 2, 4)
    assert rows.positions.tolist() == [3, 4, 5, 0, 1, 2]
    assert rows.kv_slots.tolist() == [5 * 4 + 3, 6 * 4, 6 * 4 + 1, 28, 29, 30]
    assert rows.kv_lens.tolist() == [6, 3]
    assert rows.block_tables.tolist() == [[5, 6], [7, 9]]


@on_each_kernel_device
@pytest.mark.parametrize(
    ("num_pages", "page_size", "width"), [(1, 4, 1), (5, 16, 4), (37, 32, 7), (2100, 8, 3)]
)
def test_the_kernel_computes_the_same_rows_as_the_reference(
    device: str, num_pages: int, page_size: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(num_pages)
    table = torch.randint(0, 10**6, (11, num_pages + 3), generator=generator, dtype=torch.int32)
    slots = torch.randperm(11, generator=generator)[:7]
    first = torch.randint(0, num_pages * page_size - width + 1, (7,), generator=generator)
    first[0], first[1] = 0, num_pages * page_size - width
    expected = window_rows_reference(table, slots, first, width, num_pages, page_size)
    found = window_rows(
        table.to(device), slots.to(device), first.to(device), width, num_pages, page_size
    )
    for each in fields(found):
        own, wanted = getattr(found, each.name).cpu(), getattr(expected, each.name)
        assert own.dtype == wanted.dtype and torch.equal(own, wanted), each.name
