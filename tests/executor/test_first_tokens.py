"""First tokens are sent before the drafts after them, whose time belongs to no later round."""

from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.executor.draft_caches import network_of
from tests.executor.harness import Harness, output_of
from tests.executor.test_context_graphs import with_graphs
from tests.executor.test_observations import Told
from tests.lossless.engines import tiny_engine
from tllm_spec.executor.device.transfer import DeviceSpan, ToHost
from tllm_spec.executor.rounds.round_reader import RoundClock

ON_DEVICE = ("draft_target_one_model", "eagle3", "eagle3_two_model")


@pytest.mark.parametrize("how", ["alone", "alone, in a graph", "with windows"])
@pytest.mark.parametrize("mode", ON_DEVICE)
def test_first_tokens_are_sent_before_anything_is_drafted_after_their_prompts(
    tiny: Path,
    drafts: tuple[Path, Path],
    eager_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    how: str,
) -> None:
    options, plain = tiny_engine(mode, drafts, 3), Harness(tiny)
    harness = (
        with_graphs(monkeypatch, tiny, **options) if "graph" in how else Harness(tiny, **options)
    )
    with_windows = how == "with windows"
    proposer, happened = network_of(harness), list[str]()
    propose = proposer.propose

    def watched(contexts: Any, *others: Any) -> Any:
        happened.append("windows" if contexts is None else "contexts")
        return propose(contexts, *others)

    class Recorded(ToHost):
        def __init__(self, *arguments: Any) -> None:
            happened.append("sent")
            super().__init__(*arguments)

    monkeypatch.setattr(proposer, "propose", watched)
    monkeypatch.setattr("tllm_spec.executor.rounds.round_runner.ToHost", Recorded)
    requests = []
    for each in (harness, plain):
        requests.append([each.submit([3, 1, 4], max_tokens=30)])
        if with_windows:
            for _ in range(4):
                each.round()
            requests[-1].append(each.submit([1, 5, 9, 2], max_tokens=30))
        each.run()
    before_drafts = [before for before, now in pairwise(happened) if now == "contexts"]
    assert bool(harness.parts.runner.context_graphs) == ("graph" in how)
    assert before_drafts == ["sent"] * (1 + with_windows)
    assert list(map(output_of, requests[0])) == list(map(output_of, requests[1]))


class PostSend:
    """Two milliseconds of a device."""

    def end(self) -> None: ...
    def seconds(self) -> float:
        return 0.002


def test_the_next_rounds_time_begins_when_the_device_has_finished_after_the_results() -> None:
    clock, post_send = RoundClock(), cast(DeviceSpan, PostSend())
    assert clock.lap(1.0) is None
    assert clock.lap(1.010, post_send) == pytest.approx(0.010)
    assert clock.lap(1.020) == pytest.approx(0.008)
    assert clock.lap(1.030, post_send) == pytest.approx(0.010)
    assert clock.lap(1.031) == 0.0  # the host had seen the results before late
    clock.lap(1.040, post_send)
    clock.stop()
    assert clock.lap(1.050) is None
    assert clock.lap(1.060) == pytest.approx(0.010)


@pytest.mark.parametrize("mode", ON_DEVICE)
def test_drafts_after_a_prompt_count_for_no_time_that_the_controller_learns(
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On a clock that moves by 3 ms whenever it is read."""
    now = count(0)
    monkeypatch.setattr(ToHost, "is_here", property(lambda to_host: False))  # as on a device
    monkeypatch.setattr("tllm_spec.executor.rounds.round_runner.DeviceSpan", PostSend)
    monkeypatch.setattr(
        "tllm_spec.executor.rounds.round_reader.perf_counter", lambda: 0.003 * next(now)
    )
    harness = Harness(tiny, **tiny_engine(mode, drafts, 3))
    told = Told(harness)
    keep, number = harness.submit([3, 1, 4], max_tokens=60), 0
    while not keep.is_finished:
        if number % 3 == 0:
            harness.submit([3, 1, 4, number % 50], max_tokens=2)
        harness.round()
        number += 1
    times = [round(seconds, 6) for _, _, _, seconds, _ in told.rounds if seconds is not None]
    assert {*times} == {0.001, 0.003}  # after a prompt, and two rounds after it
    totals = harness.executor.totals.state([])["by_draft_len"].values()
    assert sum(row["timed_rounds"] for row in totals) > number // 2


@pytest.mark.gpu
def test_a_device_tells_how_long_it_worked() -> None:
    span = DeviceSpan()
    torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
    span.end()
    assert 0.005 < span.seconds() < 0.1


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_whole_answer_and_a_streamed_one_have_the_time_when_their_first_token_was_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    harness, calls, latest = Harness(tiny, disable_overlap_scheduler=not overlaps), [0], [0]

    def clock() -> float:
        calls[0] += 1
        return latest[0]

    monkeypatch.setattr("tllm_spec.executor.rounds.round_reader.monotonic", clock)
    whole = harness.submit([3, 1, 4], max_tokens=6)
    streamed = harness.submit([1, 5, 9, 2], max_tokens=6, streaming=True)
    while harness.round():
        latest[0] += 1
    (answer,), responses = (
        harness.responses[whole.request_id],
        harness.responses[streamed.request_id],
    )
    assert len(responses) > 1 and calls == [2], "once for each request"
    times = {response.first_token_time for response in [answer, *responses]}
    assert times == {float(overlaps)} and latest[0] > 4
