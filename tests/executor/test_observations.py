"""What the controller is told of each round: the draft length that produced it, whose results
count, and its time."""

from collections.abc import Callable, Iterable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.executor.conftest import Clock
from tests.executor.harness import Harness, output_of, user_provided
from tests.executor.hooks import around_reads
from tests.lossless.engines import tiny_engine
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.round_reader import LaunchedRound
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.outputs import SpeculativeStats

MAX_DRAFT_LEN = 4
LADDER = {"candidate_steps": [0, 1, 4]}
DRAFTED = ("draft_target", "draft_target_one_model", "eagle3", "eagle3_two_model")


class Told:
    """Listens to what the controller is told. `rounds`: the first four fields and all fields
    of each."""

    def __init__(self, harness: Harness) -> None:
        self.rounds: list[tuple[int, list[int], int, float | None, dict[str, Any]]] = []
        observe = harness.parts.controller.observe

        def listen(observed: ObservedRound) -> bool:
            size, accepted, steps, seconds, *_ = observed
            assert steps is not None
            self.rounds.append((size, list(accepted), steps, seconds, observed._asdict()))
            return observe(observed)

        harness.parts.controller.observe = listen  # type: ignore[method-assign] # the test listens


@pytest.fixture(scope="module")
def itself(tiny: Path, drafts: tuple[Path, Path]) -> tuple[Path, Path]:
    """The target as its own draft model: every draft is right."""
    return tiny, drafts[1]


def force(harness: Harness, lengths: Iterable[int]) -> list[int]:
    """The draft lengths of all rounds to come; those that were asked for so far."""
    asked: list[int] = []
    coming = iter(lengths)

    def tier_for(batch_size: int) -> int:
        asked.append(next(coming))
        return asked[-1]

    harness.parts.tier_for = tier_for
    return asked


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [True, False])
def test_every_observation_carries_the_draft_length_that_produced_it(
    tiny: Path, itself: tuple[Path, Path], overlap: bool
) -> None:
    """Every draft is accepted, so an observation of another round's length would show."""
    options = tiny_engine("draft_target_one_model", itself, MAX_DRAFT_LEN, adaptive=LADDER)
    harness = Harness(tiny, **(options | {"disable_overlap_scheduler": not overlap}))
    told = Told(harness)
    lengths = [4, 4, 1, 1, 0, 0, 4, 1, 4, 0, 1, 2, 4, 4, 3]
    asked = force(harness, cycle(lengths))
    lags = []
    around_reads(harness.executor, lambda _: lags.append(len(asked) - 1 - len(told.rounds)))
    requests = [harness.submit([i + 1, 2], max_tokens=90) for i in range(3)]
    harness.run()
    assert max(lags) == 1 + overlap  # one is the context's
    # A round verifies what the round before made, as far as its own window goes.
    expected = [min(before, now) for before, now in pairwise(asked)]
    found = [steps for _, _, steps, _, _ in told.rounds]
    assert found == expected[: len(found)] and set(found) >= {0, 1, 2, 4}
    for _, accepted, steps, _, _ in told.rounds:
        assert set(accepted) <= {steps}
    stats = sum((request.counters.stats() for request in requests), SpeculativeStats())
    seen = [(steps, num) for _, accepted, steps, _, _ in told.rounds for num in accepted]
    assert stats.rounds == len(seen)
    for place in range(MAX_DRAFT_LEN):
        assert stats.per_position_drafted[place] == sum(steps > place for steps, _ in seen)
    lost = sum(num for _, num in seen) - stats.num_accepted_tokens  # drafts after a request's end
    assert 0 <= lost <= MAX_DRAFT_LEN * len(requests)


def test_requests_that_ended_before_a_round_was_read_do_not_count_as_pausing(
    tiny: Path, itself: tuple[Path, Path]
) -> None:
    """With overlap a request takes part in one round after its last token, or after it was
    cancelled."""
    options = tiny_engine(
        "draft_target_one_model", itself, MAX_DRAFT_LEN, adaptive={"candidate_steps": [4]}
    )
    harness = Harness(tiny, **options)
    told = Told(harness)
    for number in range(6):
        harness.submit([number + 1, 2], max_tokens=4 + 7 * number)
    harness.rounds(4)
    harness.queue.cancel(6)
    harness.run()
    gone = [size - more["num_requests"] for size, _, _, _, more in told.rounds]
    assert max(gone) >= 1
    for _, accepted, _, _, more in told.rounds:
        assert len(accepted) == more["num_requests"]
    assert harness.parts.controller.state()["slots"]["1"]["drafted_share"] == 1.0


def test_requests_that_pause_lower_the_drafted_share(tiny: Path) -> None:
    """The drafts of the first request are right, those of the second never are."""
    plain = Harness(tiny, disable_overlap_scheduler=True)
    texts = [plain.submit([number + 1, 2], max_tokens=40) for number in range(2)]
    plain.run()

    def propose(request: LlmRequest) -> list[int]:
        text = output_of(texts[request.tokens[0] - 1])
        right = text[request.num_output_tokens :][: request.num_drafts_wanted]
        return right if request.tokens[0] == 1 else [63 - token for token in right]

    options = user_provided(propose)
    options["speculative_config"] |= {"adaptive": {"candidate_steps": [1]}}
    harness = Harness(tiny, **options)
    told = Told(harness)
    requests = [harness.submit([number + 1, 2], max_tokens=40, patience=2) for number in range(2)]
    shares = []
    while not all(request.is_finished for request in requests):
        harness.round()
        shares.append(harness.parts.controller.state()["slots"]["1"]["drafted_share"])
    shared = [accepted for size, accepted, steps, _, _ in told.rounds if size == 2 and steps]
    assert shared[:6] == [[1, 0], [1, 0], [1], [1], [1, 0], [1]] and min(shares) < 0.7
    assert list(map(output_of, requests)) == list(map(output_of, texts))


def test_a_preempted_request_still_shows_what_it_had_in_flight(
    tiny: Path, itself: tuple[Path, Path]
) -> None:
    options = tiny_engine(
        "draft_target_one_model", itself, MAX_DRAFT_LEN, adaptive={"candidate_steps": [4]}
    )
    cache = {"tokens_per_block": 4, "max_tokens": 120}
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    harness = Harness(tiny, kv_cache_config=cache, scheduler_config=policy, **options)
    told = Told(harness)
    requests = [harness.submit([number + 1, 2], max_tokens=40) for number in range(4)]
    harness.run()
    assert sum(request.num_preemptions for request in requests) > 0
    rounds = sum(request.counters.stats().rounds for request in requests)
    assert rounds == sum(len(accepted) for _, accepted, _, _, _ in told.rounds)
    assert all(set(accepted) <= {steps} for _, accepted, steps, _, _ in told.rounds)


def test_missing_drafts_are_no_rejections_for_the_gate_but_count_for_ema(tiny: Path) -> None:
    plain = Harness(tiny, disable_overlap_scheduler=True)
    texts = [plain.submit([i + 1, 2], max_tokens=40) for i in range(4)]
    plain.run()

    def propose(request: LlmRequest) -> list[int]:
        text = output_of(texts[request.tokens[0] - 1])
        return text[request.num_output_tokens :][:2] if request.tokens[0] == 1 else []

    ladders = {
        "strategy": "ema",
        "update_interval": 1,
        "warmup_batches": 0,
        1: {"candidate_steps": [1, 2, 4]},
    }
    options = user_provided(propose)
    options["speculative_config"] |= {
        "adaptive": ladders,
        "max_rejected_rounds": None,
        "acceptance_rate_threshold": 0.9,
        "acceptance_rate_window_size": 2,
    }
    harness = Harness(tiny, **options)
    told = Told(harness)
    for number in range(4):
        harness.submit([number + 1, 2], max_tokens=40)
    harness.parts.tier_for = lambda *_: 4
    harness.run()
    assert not harness.parts.controller.state()["limits"]["gate"]["is_closed"]
    shared = [each for each in told.rounds if each[0] == 4 and each[4]["asked_draft_len"] == 4]
    assert len(shared) > 5
    for _, accepted, steps, _, more in shared:
        assert (sorted(accepted), steps, more["num_drafted"]) == ([0, 0, 0, 2], 2, 2)
    assert harness.parts.controller.state()["slots"]["1"]["steps"] == 1  # half a draft a request


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", DRAFTED)
def test_padding_after_a_requests_own_limit_counts_as_rejected(
    tiny: Path, itself: tuple[Path, Path], mode: str
) -> None:
    """A request with limit 0 is not drafted for, so it does not count. That with limit 1 has a
    window of 4 drafts."""
    harness = Harness(tiny, **tiny_engine(mode, itself, MAX_DRAFT_LEN, adaptive=LADDER))
    told = Told(harness)
    harness.parts.tier_for = lambda *_: 4
    for limit in (0, 1):
        harness.submit([limit + 1, 2], max_tokens=60, draft_limit=limit)
    harness.run()
    both = [each for each in told.rounds if each[0] == 2 and each[4]["num_requests"] == 2][1:-3]
    assert len(both) > 10
    for _, accepted, steps, _, more in both:
        assert len(accepted) == 1 and more["num_drafted"] == 1
        assert steps == 4
    if mode == "draft_target_one_model":
        assert harness.parts.controller.tier_for(1) <= 1


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [True, False])
def test_a_time_belongs_to_the_round_that_took_it_and_to_one_draft_length(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    tiny: Path,
    itself: tuple[Path, Path],
    overlap: bool,
) -> None:
    """A forward takes 1 ms, with windows of 4 drafts 30, with prompts 200. Idle time, rounds with
    prompts, and windows that have no drafts yet are not counted."""
    options = tiny_engine("draft_target_one_model", itself, MAX_DRAFT_LEN, adaptive=LADDER)
    harness = Harness(tiny, **(options | {"disable_overlap_scheduler": not overlap}))
    forward = harness.parts.runner.engine.forward

    def slow(contexts: list[ContextChunk], windows: Windows | None, *wanted: Any) -> Any:
        has_drafts = windows is not None and windows.token_ids.shape[1] == 5
        clock.now += 0.2 if contexts else 0.03 if has_drafts else 0.001
        return forward(contexts, windows, *wanted)

    monkeypatch.setattr(harness.parts.runner.engine, "forward", slow)
    told, is_pure = Told(harness), []

    def look(launched: LaunchedRound) -> Callable[[], None]:
        batch, before = launched.batch, len(told.rounds)

        def note() -> None:
            if len(told.rounds) > before:
                is_pure.append(
                    not batch.context_requests and batch.shape.depth == told.rounds[-1][2]
                )

        return note

    around_reads(harness.executor, look)
    lengths = cycle([4, 4, 4, 0, 0, 0])
    harness.parts.tier_for = lambda *_: next(lengths)
    for number in range(2):
        harness.submit([number + 1, 2], max_tokens=40)
        harness.rounds(6)
        harness.submit(
            [number + 1, 3], max_tokens=20
        )  # its prompt is read with the other's windows
        harness.run()
        clock.now += 0.1
    assert [seconds is not None for _, _, _, seconds, _ in told.rounds] == is_pure
    timed = [(steps, seconds) for _, _, steps, seconds, _ in told.rounds if seconds is not None]
    assert {steps for steps, _ in timed} == {0, 4} and len(timed) < len(told.rounds)
    expected = {4: 0.03, 0: 0.001}
    assert all(seconds == pytest.approx(expected[steps], abs=1e-6) for steps, seconds in timed)


def test_a_round_that_broke_off_takes_no_time_of_the_next_one(clock: Clock, tiny: Path) -> None:
    def propose(request: LlmRequest) -> list[int]:
        clock.now += 0.001
        if request.tokens[0] == 1 and request.num_output_tokens > 5:
            clock.now += 0.3
            raise RuntimeError("no more")
        return [1]

    options = user_provided(propose)
    options["speculative_config"] |= {"adaptive": LADDER}
    harness = Harness(tiny, **options)
    told = Told(harness)
    harness.parts.tier_for = lambda *_: 1
    requests = [harness.submit([number, 2], max_tokens=30) for number in (1, 2)]
    harness.run()
    assert [request.finish_reason for request in requests] == ["error", "length"]
    times = [seconds for _, _, _, seconds, _ in told.rounds if seconds is not None]
    assert len(times) > 10 and max(times) == pytest.approx(0.002, abs=1e-6)


@pytest.mark.parametrize("ladder", [[1, 4], [0, 2, 4]])
def test_a_full_forward_makes_windows_shorter_along_the_ladder(
    tiny: Path, drafts: tuple[Path, Path], ladder: list[int]
) -> None:
    options = tiny_engine(
        "eagle3",
        drafts,
        MAX_DRAFT_LEN,
        adaptive={"strategy": "ema", 1: {"candidate_steps": ladder}},
    )
    harness = Harness(tiny, max_num_tokens=12, max_batch_size=6, **options)
    told = Told(harness)
    requests = [harness.submit([number + 1, 2], max_tokens=10 + 6 * number) for number in range(6)]
    harness.run()
    assert all(request.finish_reason == "length" for request in requests)
    # 12 tokens: room for 5, 3, 2 and 1 drafts of 2, 3, 4 and 5 or 6 requests.
    longest = {
        size: max(rung for rung in [0, *ladder] if rung <= 12 // size - 1) for size in range(1, 7)
    }
    assert all(steps <= longest[size] for size, _, steps, _, _ in told.rounds)
    assert {steps for _, _, steps, _, _ in told.rounds} <= {0, *ladder}
    for size in range(1, 7):
        assert harness.parts.controller.tier_for(size) <= longest[size]
    assert harness.parts.controller.tiers_at(6) == {ladder[0]}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", DRAFTED)
def test_a_shorter_tier_has_fewer_rows_in_the_targets_forward(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, drafts, MAX_DRAFT_LEN, adaptive=LADDER))
    engine, shapes = harness.parts.runner.engine, []
    forward = engine.forward

    def counted(contexts: list[ContextChunk], windows: Windows | None, *wanted: Any) -> Any:
        hidden = forward(contexts, windows, *wanted)
        if not contexts:
            shapes.append(len(hidden))
        return hidden

    monkeypatch.setattr(engine, "forward", counted)
    for number in range(3):
        harness.submit([number + 1, 2], max_tokens=200)
    for draft_len in [4, *[4, 1, 1, 0, 0, 4] * 3]:
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
    assert shapes == [3 * rows for rows in [5, 2, 2, 1, 1, 5] * 3]


@pytest.mark.thinned
@pytest.mark.parametrize("mode", ["draft_target", "draft_target_one_model"])
def test_a_round_in_which_a_draft_model_catches_up_has_no_time(
    tiny: Path, itself: tuple[Path, Path], mode: str
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, itself, MAX_DRAFT_LEN, adaptive=LADDER))
    told, catches_up = Told(harness), []
    force(harness, cycle([4] * 3 + [0] * 20 + [4] * 3 + [0] * 4))

    def look(launched: LaunchedRound) -> Callable[[], None]:
        before = len(told.rounds)

        def note() -> None:
            if len(told.rounds) > before:
                catches_up.append(launched.batch.catches_up)

        return note

    around_reads(harness.executor, look)
    for number in range(2):
        harness.submit([number + 1, 2], max_tokens=300)
    harness.run()
    assert sum(catches_up) > 3
    found = zip(told.rounds, catches_up, strict=True)
    assert all(seconds is None for (_, _, _, seconds, _), caught in found if caught)
