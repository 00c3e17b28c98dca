"""Which rows belong to which request, of a rectangle and of requests with rows of their own."""

import torch

from tests.kernels.row_counts import ragged_rows
from tllm_spec.kernels.slots.round_rows import RoundRows

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
