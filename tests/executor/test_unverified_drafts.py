"""Drafts at draft length 0: compared with what is emitted, never verified, and no more of them than
the time allows."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.executor.harness import Harness, output_of, user_provided
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.draft_length.unverified_drafts import (
    MAX_REQUESTS,
    Proposal,
    UnverifiedDrafts,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Text:
    tokens: list[int] = field(default_factory=lambda: [1, 2])
    is_finished: bool = False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Setup:
    told: list[tuple[int, list[int], int, int]]
    clock: Clock
    unverified: UnverifiedDrafts

    def round(self, seconds: float = 0.01) -> bool:
        self.clock.now += seconds
        self.unverified.compare()
        return self.unverified.is_due()

    def add(
        self, *drafted: tuple[Text, list[int]], seconds: float = 0.0, batch_size: int = 4
    ) -> None:
        self.clock.now += seconds
        self.unverified.add(
            batch_size, [Proposal(text, len(text.tokens), drafts, True) for text, drafts in drafted]
        )


@pytest.fixture
def setup() -> Setup:
    told: list[tuple[int, list[int], int, int]] = []
    clock = Clock()

    def learn(
        batch_size: int, num_accepted: object, num_steps: int, num_requests: int, sampled: bool
    ) -> None:
        told.append((batch_size, list(num_accepted), num_steps, num_requests))  # type: ignore[call-overload] # ints

    return Setup(told, clock, UnverifiedDrafts(learn, 0.01, clock))


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import tllm_spec.executor.speculative.draft_length.unverified_drafts"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("emitted", "accepted"),
    [([], None), ([9], 0), ([5], None), ([5, 6], None), ([5, 9], 1), ([5, 6, 7, 8], 3)],
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_emitted(
    emitted: list[int], accepted: int | None
) -> None:
    text = Text()
    proposal = Proposal(text, 2, [5, 6, 7], True)
    text.tokens += emitted
    assert proposal.num_accepted == accepted


def test_all_requests_of_a_look_are_told_of_together_once_all_are_known(setup: Setup) -> None:
    first, second, third = Text(), Text(), Text()
    assert setup.round()
    setup.add((first, [5, 6]), (second, [7]), (third, []))
    first.tokens.append(5)
    second.tokens.append(8)
    assert not setup.round() and setup.told == []
    first.tokens.append(6)
    assert setup.round() and setup.told == [(4, [2, 0, 0], 2, 3)]
    assert setup.round() and len(setup.told) == 1


def test_what_an_end_cut_off_shows_nothing_and_holds_nobody_up(setup: Setup) -> None:
    ended, other = Text(), Text()
    setup.round()
    setup.add((ended, [5, 6]), (other, [7]))
    ended.tokens.append(5)
    ended.is_finished = True
    other.tokens.append(7)
    assert setup.round() and setup.told == [(4, [1], 2, 1)]


def test_requests_for_which_no_drafts_are_wanted_count_only_as_requests(setup: Setup) -> None:
    text = Text()
    setup.round()
    setup.unverified.add(2, [Proposal(text, 2, [5], True), Proposal(Text(), 2, [], False)])
    text.tokens.append(5)
    setup.round()
    assert setup.told == [(2, [1], 1, 2)]


def test_nothing_proposed_is_nothing_to_tell(setup: Setup) -> None:
    setup.round()
    setup.add((Text(), []))
    assert setup.round() and setup.told == []


def test_making_drafts_takes_its_share_of_the_time_and_no_more(setup: Setup) -> None:
    looks, text = 0, Text()
    for _ in range(10_000):  # rounds of 10 ms, and drafts take a millisecond: one round in ten
        if setup.round():
            looks += 1
            setup.add((text, [5]), seconds=0.001)
            text.tokens.append(5)
    assert looks == pytest.approx(1000, rel=0.02)


def test_idle_time_does_not_pay_for_many_looks(setup: Setup) -> None:
    setup.round(3600.0)
    setup.add((Text(), []), seconds=0.01)
    assert [setup.round() for _ in range(49)].count(True) == 0


def test_everybody_gets_a_turn(setup: Setup) -> None:
    seen: set[int] = set()
    for _ in range(4):
        places = setup.unverified.places(30)
        assert len(places) == MAX_REQUESTS
        seen |= set(places)
    assert seen == set(range(30))
    assert sorted(setup.unverified.places(3)) == [0, 1, 2]


def test_good_drafts_are_found_at_draft_length_0_without_a_probe_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    plain = Harness(tiny, max_seq_len=512)
    expected_request = plain.submit([3, 1, 2], max_tokens=400)
    plain.run()
    expected = output_of(expected_request)
    turn = 250  # drafts are wrong before it

    def propose(request: LlmRequest) -> list[int]:
        done = request.num_output_tokens
        right = expected[done : done + request.num_drafts_wanted]
        return right if done >= turn else [(token + 1) % plain.vocab_size for token in right]

    adaptive = {
        "candidate_steps": [0, 3],
        "probe_round_share": 0.0,
        "unverified_time_share": 1.0,
        "time_cell_smoothing": 1e-9,
    }
    monkeypatch.setattr(
        "tllm_spec.executor.rounds.round_runner.RoundRunner.seconds",
        lambda _, key, *__: 1.0 + 0.1 * key.draft_len,
    )
    options = user_provided(propose, 3)
    options["speculative_config"]["adaptive"] = adaptive
    harness = Harness(tiny, max_seq_len=512, **options)
    request = harness.submit([3, 1, 2], max_tokens=400)
    asked: list[tuple[int, int]] = []
    steps_for = harness.parts.draft_len_for

    def listen(batch_size: int, sampled: bool) -> int:
        asked.append((request.num_output_tokens, steps_for(batch_size, sampled)))
        return asked[-1][1]

    harness.parts.draft_len_for = listen
    harness.run()
    assert output_of(request) == expected
    lengths_at = dict(asked)
    assert lengths_at[turn - 1] == 0
    came_back = min(place for place, steps in asked if place > turn and steps == 3)
    assert came_back < turn + 40
    harness.executor.check_integrity()
