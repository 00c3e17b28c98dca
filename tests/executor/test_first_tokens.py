"""First tokens do not wait for the drafts behind them, and the time of those drafts is nobody's."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.executor.draft_caches import worker_of
from tests.executor.harness import Harness, output_of
from tests.executor.test_context_graphs import with_graphs
from tests.executor.test_observations import Told
from tests.lossless.engines import tiny_engine
from tllm_spec.executor.round_clock import RoundClock
from tllm_spec.executor.transfer import ToHost

ONE_MODEL = ("draft_target_one_model", "eagle3")
LADDER = {"candidate_steps": [0, 1, 3]}


@pytest.mark.parametrize("how", ["alone", "alone, in a graph", "beside windows"])
@pytest.mark.parametrize("mode", ONE_MODEL)
def test_first_tokens_are_under_way_before_anything_is_drafted_behind_their_prompts(
    tiny: Path,
    drafts: tuple[Path, Path],
    eager_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    how: str,
) -> None:
    options, plain = tiny_engine(mode, drafts, 3), Harness(tiny)
    harness = with_graphs(monkeypatch, tiny, **options) if "graph" in how else Harness(tiny, **options)
    beside_windows = how == "beside windows"
    worker, happened = worker_of(harness), list[str]()
    draft = worker.draft

    def watched(contexts: Any, *others: Any) -> None:
        happened.append("windows" if contexts is None else "contexts")
        draft(contexts, *others)

    class Recorded(ToHost):
        def __init__(self, *arguments: Any) -> None:
            happened.append("sent")
            super().__init__(*arguments)

    monkeypatch.setattr(worker, "draft", watched)
    monkeypatch.setattr("tllm_spec.executor.round_runner.ToHost", Recorded)
    requests = []
    for each in (harness, plain):
        requests.append([each.submit([3, 1, 4], max_tokens=30)])
        if beside_windows:
            for _ in range(4):
                each.round()
            requests[-1].append(each.submit([1, 5, 9, 2], max_tokens=30))
        each.run()
    behind = [before for before, now in pairwise(happened) if now == "contexts"]
    assert bool(harness.parts.runner.context_graphs) == ("graph" in how)
    assert behind == ["sent"] * (1 + beside_windows)
    assert list(map(output_of, requests[0])) == list(map(output_of, requests[1]))


def test_a_round_that_goes_on_behind_its_results_leaves_the_next_one_without_a_time() -> None:
    clock = RoundClock()
    clock.lap()
    assert clock.lap() is not None
    assert clock.lap(is_over=False) is not None
    assert clock.lap() is None
    assert clock.lap() is not None
    clock.lap(1.0, is_over=False)  # its end is known, whatever was sent before
    assert clock.lap(3.0) == 2.0


@pytest.mark.parametrize("mode", ONE_MODEL)
def test_drafts_behind_a_prompt_are_in_no_time_that_the_controller_learns_from(
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(ToHost, "is_here", property(lambda to_host: False))  # as on a device
    harness = Harness(tiny, **tiny_engine(mode, drafts, 3, adaptive=LADDER))
    told = Told(harness)
    harness.submit([3, 1, 4], max_tokens=30)
    harness.run()
    timed = [seconds is not None for _, _, _, seconds, _ in told.rounds]
    assert not timed[0] and sum(timed) > 3
    harness.submit([3, 1, 4, 1], max_tokens=30)
    seen = len(told.rounds)
    for _ in range(4):
        harness.round()
    assert told.rounds[seen][3] is None
