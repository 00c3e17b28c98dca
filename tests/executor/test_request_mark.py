"""Marks of single requests that are not worth drafting for."""

from itertools import pairwise
from typing import Any

from tllm_spec.adaptive_config import MarkOptions
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.request_mark import RequestMark


def drafted_rounds(mark: RequestMark, accepted_every: int, num_rounds: int) -> list[int]:
    """The rounds in which drafts were made, when every so many drafted rounds one draft is
    accepted; 0: never."""
    drafted: list[int] = []
    for number in range(num_rounds):
        if mark.is_on:
            mark.observe(0, 0)
            continue
        drafted.append(number)
        mark.observe(4, int(accepted_every > 0 and len(drafted) % accepted_every == 0))
    return drafted


def mark(**options: Any) -> RequestMark:
    return RequestMark(MarkOptions(**options))


def test_a_request_pauses_after_exactly_its_patience_and_pauses_double() -> None:
    assert drafted_rounds(mark(mark_patience=2), 0, 40) == [0, 1, 4, 9, 18, 35]
    for patience in (1, 3, 8, 20):
        rounds = drafted_rounds(mark(mark_patience=patience), 0, 3 * patience)
        assert rounds[: patience + 1] == [*range(patience), 2 * patience]


def test_no_pause_is_longer_than_the_limit() -> None:
    rounds = drafted_rounds(mark(), 0, 2000)
    assert max(after - before for before, after in pairwise(rounds)) == 65


def test_a_request_with_some_acceptance_is_never_marked() -> None:
    assert len(drafted_rounds(mark(), 4, 1000)) == 1000


def test_a_few_accepted_drafts_among_hundreds_do_not_keep_a_request_unmarked() -> None:
    assert len(drafted_rounds(mark(), 60, 2000)) < 1000


def test_an_accepted_draft_after_a_pause_starts_afresh() -> None:
    each = mark(mark_patience=2)
    for accepted in (0, 0):
        each.observe(4, accepted)
    for _ in range(2):
        each.observe(0, 0)
    each.observe(4, 1)
    assert drafted_rounds(each, 0, 10) == [0, 1, 4, 9]


def test_rounds_without_drafts_and_null_patience_say_nothing() -> None:
    each = mark(mark_patience=1)
    each.observe(0, 0)
    assert not each.is_on
    assert len(drafted_rounds(mark(mark_patience=None), 0, 500)) == 500


def test_the_controller_makes_marks_with_its_options() -> None:
    each = AdaptiveController.from_config({"mark_patience": 1}).new_mark()
    each.observe(1, 0)
    assert each.is_on
