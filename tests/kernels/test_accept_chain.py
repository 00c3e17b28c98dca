"""`accept_chain` against a loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tllm_spec.kernels.slots.accept import accept_chain


def accepted_by_loop(targets: list[int], drafts: list[int], num_drafts: int) -> int:
    count = 0
    while count < num_drafts and targets[count] == drafts[count]:
        count += 1
    return count + 1


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_acceptance_ends_at_the_first_draft_that_differs_from_the_target(
    data: st.DataObject, num_rows: int, length: int
) -> None:
    def rows(width: int, upper: int) -> st.SearchStrategy[list[list[int]]]:
        row = st.lists(st.integers(-1, upper), min_size=width, max_size=width)
        return st.lists(row, min_size=num_rows, max_size=num_rows)

    targets, drafts = data.draw(rows(length + 1, 1)), data.draw(rows(length, 1))
    counts = data.draw(st.lists(st.integers(0, length), min_size=num_rows, max_size=num_rows))
    tensors = torch.tensor(targets), torch.tensor(drafts, dtype=torch.int64).view(num_rows, length)
    found = accept_chain(*tensors, torch.tensor(counts)).tolist()
    assert found == [accepted_by_loop(*row) for row in zip(targets, drafts, counts, strict=True)]
    unlimited = accept_chain(*tensors, None).tolist()
    assert unlimited == [
        accepted_by_loop(*row, length) for row in zip(targets, drafts, strict=True)
    ]


def test_lengths_are_int64_and_the_inputs_are_not_changed() -> None:
    targets, drafts = torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[5, 6], [6, 6]])
    before = drafts.clone()
    lens = accept_chain(targets, drafts, None)
    assert lens.dtype == torch.int64 and lens.tolist() == [3, 1] and torch.equal(drafts, before)
