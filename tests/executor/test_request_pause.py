"""Single requests pause drafting while their drafts keep being rejected."""

from itertools import pairwise

from tllm_spec.executor.request import MAX_PAUSE, RequestPause


def drafted_rounds(pause: RequestPause, accepted_every: int, num_rounds: int) -> list[int]:
    """The rounds in which drafts were made, when every so many drafted rounds one draft is
    accepted; 0: never."""
    drafted: list[int] = []
    for number in range(num_rounds):
        if pause.rounds_left > 0:
            pause.observe(0, 0)
            continue
        drafted.append(number)
        pause.observe(4, int(accepted_every > 0 and len(drafted) % accepted_every == 0))
    return drafted


def test_a_request_pauses_after_exactly_its_patience_and_pauses_double() -> None:
    assert drafted_rounds(RequestPause(2), 0, 40) == [0, 1, 4, 9, 18, 35]
    for patience in (1, 3, 8, 20):
        rounds = drafted_rounds(RequestPause(patience), 0, 3 * patience)
        assert rounds[: patience + 1] == [*range(patience), 2 * patience]


def test_no_pause_is_longer_than_the_limit() -> None:
    rounds = drafted_rounds(RequestPause(8), 0, 2000)
    assert max(after - before for before, after in pairwise(rounds)) == MAX_PAUSE + 1


def test_a_request_with_some_acceptance_never_pauses() -> None:
    assert len(drafted_rounds(RequestPause(8), 4, 1000)) == 1000


def test_a_few_accepted_drafts_among_hundreds_do_not_prevent_pauses() -> None:
    assert len(drafted_rounds(RequestPause(8), 60, 2000)) < 1000


def test_an_accepted_draft_after_a_pause_starts_afresh() -> None:
    pause = RequestPause(2)
    for accepted in (0, 0):
        pause.observe(4, accepted)
    for _ in range(2):
        pause.observe(0, 0)
    pause.observe(4, 1)
    assert drafted_rounds(pause, 0, 10) == [0, 1, 4, 9]


def test_a_round_without_drafts_says_nothing_and_without_patience_there_are_no_pauses() -> None:
    pause = RequestPause(1)
    pause.observe(0, 0)
    assert pause.rounds_left == 0
    assert len(drafted_rounds(RequestPause(), 0, 500)) == 500
