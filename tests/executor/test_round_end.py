"""Which rows of the target's forward a draft network takes hidden states from."""

import pytest
import torch

from tests.kernels.row_counts import ragged_rows
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.speculative.drafting.round_end import WindowResult
from tllm_spec.kernels.slots.round_rows import RoundRows

TREE = DraftShape(2, 4, 2, mean_rows=3)
PATHS = torch.tensor([[0, 1, 1], [0, 2, 3], [0, 0, 0]])


def taken(part: RoundRows | None, read_rows: torch.Tensor | None) -> list[int]:
    """After two rows of chunks."""
    three = torch.arange(3)
    windows = Windows(three, three, torch.zeros(3, 5, dtype=torch.int64), 9, part=part)
    sampled = SampledTokens(PATHS, three, rows=PATHS)
    rows = WindowResult(windows, sampled, TREE, read_rows).captured_rows(2)
    assert rows is not None
    return [int(row) - 2 for row in rows[2:]]


@pytest.mark.parametrize("are_padded", [False, True])
def test_rows_of_trees_that_share_a_round_are_those_of_the_accepted_path(are_padded: bool) -> None:
    part = ragged_rows((2, 4, 1), 5)
    padded = part.padded_rows.flatten() if are_padded else None
    expected = [0, 1, 1, 2, 4, 5, 6, 6, 6]
    assert taken(None if are_padded else part, padded) == expected


def test_rows_of_whole_trees_are_those_of_the_accepted_path() -> None:
    assert taken(None, None) == [0, 1, 1, 5, 7, 8, 10, 10, 10]
