"""Rounds in which not all requests are greedy have draft lengths of their own: they take longer,
and their drafts are accepted less often."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness
from tests.executor.played_rounds import LADDER, LinearTimes, controller, play
from tests.executor.test_observations import Told
from tests.lossless.engines import tiny_engine
from tllm_spec.adaptive_config import RoundTimeOptions
from tllm_spec.executor.draft_lens import measure_round_times
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import (
    CorrectedRoundTimes,
    MeasuredRoundTimes,
)

STEPS = {"candidate_steps": [0, 1, 3]}


class SlowSampling(LinearTimes):
    """A draft of a sampled round takes as long as two of a greedy one."""

    def sampling_time(self, batch_size: int, draft_len: int) -> float:
        return self.draft_ms * draft_len / 1e3


def test_what_greedy_drafts_won_is_not_lost_again_in_sampled_rounds() -> None:
    controls = controller(draft_ms=2.5)
    play(controls, 500, 3)
    assert play(controls, 500, 0, sampled=True).count(0) > 480
    assert play(controls, 100, 3) == [3] * 100
    state = controls.state()
    assert state["slots"]["1"]["steps"] == {"1": 3} and state["slots"]["1 sampled"]["steps"] == {
        "1": 0
    }
    assert {(switch["sampled"], switch["new_steps"]) for switch in state["decisions"]["last"]} >= {
        (True, 0)
    }


def test_sampled_rounds_are_compared_by_their_own_times() -> None:
    config = {"strategy": "cost_model", "candidate_steps": list(LADDER)}
    controls = AdaptiveController.from_config(config, round_times=SlowSampling(6.0))
    for sampled in (False, True):
        play(controls, 400, 1, sampled=sampled)
    assert [controls.steps_for(1, sampled) for sampled in (False, True)] == [1, 0]


def test_times_of_sampled_rounds_correct_those_of_no_greedy_one() -> None:
    times = CorrectedRoundTimes(SlowSampling(2.0), LADDER, RoundTimeOptions())
    for _ in range(50):
        times.observe(1, 0, 0.020, True)
        times.observe(1, 3, 0.016)
    state = times.state()
    assert state["1 sampled"]["0"] == pytest.approx(20, rel=0.01) and state["1"][
        "3"
    ] == pytest.approx(16)
    assert state["1"]["0"] == pytest.approx(10)


def test_without_news_of_sampling_rounds_take_what_is_on_the_line_between_the_sizes_that_were_timed() -> (
    None
):
    rows = {size: {0: 0.01, 2: 0.02} for size in (1, 4, 8)}
    times = MeasuredRoundTimes(rows, sampling={1: {0: 0.001, 2: 0.003}, 5: {0: 0.005, 2: 0.007}})
    assert times.sampling_time(1, 1) == pytest.approx(0.002)
    assert times.sampling_time(3, 2) == pytest.approx(0.005)
    assert times.sampling_time(9, 0) == pytest.approx(0.009)
    assert MeasuredRoundTimes(rows).sampling_time(4, 2) == 0


def test_sglangs_strategy_has_one_state_for_both() -> None:
    controls = AdaptiveController.from_config("conservative")
    play(controls, 40, 0)
    assert controls.steps_for(1) == controls.steps_for(1, sampled=True) == 1
    assert "1 sampled" not in controls.state()["slots"]


def test_start_up_times_sampled_rounds_of_a_few_sizes(
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny, **tiny_engine("eagle3", drafts, 3, adaptive=STEPS))
    timed: list[GraphKey] = []

    def seconds(runner: Any, key: GraphKey, *others: Any) -> float:
        timed.append(key)
        return 0.001 * (1 + key.draft_len) * (2 if key.sampled else 1)

    runner = harness.parts.runner
    monkeypatch.setattr(type(runner), "seconds", seconds)
    device = harness.parts.slots.device
    times = measure_round_times(runner, harness.parts.controller, (1, 2, 4, 6, 8), 0, device)
    assert {key.batch_size for key in timed if key.sampled} == {1, 4, 8}
    assert {key.batch_size for key in timed if not key.sampled} == {1, 2, 4, 6, 8}
    assert times.round_time(2, 3) == pytest.approx(0.004)
    assert times.sampling_time(2, 3) == pytest.approx(0.004)


@pytest.mark.parametrize("mode", ["ngram", "draft_target", "eagle3", "eagle3_two_model"])
def test_the_controller_is_asked_and_told_whether_some_request_of_a_round_is_sampled(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    harness = Harness(tiny, **tiny_engine(mode, drafts, 3, adaptive=STEPS))
    told, asked = Told(harness), set[tuple[int, bool]]()
    steps_for = harness.parts.draft_len_for

    def listen(batch_size: int, sampled: bool) -> int:
        asked.add((batch_size, sampled))
        return steps_for(batch_size, sampled)

    harness.parts.draft_len_for = listen
    harness.submit([3, 1, 4], max_tokens=40)
    for _ in range(6):
        harness.round()
    harness.submit([3, 1, 4], max_tokens=8, temperature=1.0)
    harness.run()
    assert asked >= {(1, False), (2, True)} and (2, False) not in asked
    assert {(size, more["sampled"]) for size, _, _, _, more in told.rounds} == {
        (1, False),
        (2, True),
    }
