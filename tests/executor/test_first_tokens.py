"""First tokens are sent before the drafts after them, whose time belongs to no later round."""

from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.executor.draft_caches import network_of
from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.test_context_graphs import with_graphs
from tests.executor.test_observations import Told
from tests.lossless.engines import engine, tiny_engine
from tllm_spec import LLM, SamplingParams
from tllm_spec.bench.break_even import FreeDrafts
from tllm_spec.executor import totals as draft_watch
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, ToHost
from tllm_spec.executor.request import MAX_PAUSE, RequestPause
from tllm_spec.executor.rounds.round_reader import RoundClock

ON_DEVICE = ("draft_target_one_model", "eagle3", "eagle3_two_model")


@pytest.mark.covering
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

    def watched(seen: Any, *others: Any) -> Any:
        happened.append("windows" if seen.contexts is None else "contexts")
        return propose(seen, *others)

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
            each.rounds(4)
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


@pytest.mark.thinned(3)
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


# Where the rounds in flight may be the last of all requests, by `max_tokens`, the host reads them
# before the next launch.


PROMPT = [3, 14, 15, 9, 26, 5, 35]


def launches(harness: Harness) -> list[tuple[list[int], int]]:
    """Lists whose the rounds to come are, and how many were in flight at each launch."""
    found: list[tuple[list[int], int]] = []

    def look(batch: ScheduledBatch) -> None:
        ids = [request.request_id for request in batch.requests()]
        found.append((ids, len(rounds_in_flight(harness.executor))))

    before_launch(harness.executor, look)
    return found


def always_right(tiny: Path, **options: Any) -> Harness:
    """The target drafts for itself: 4 tokens a round."""
    return Harness(tiny, **draft_target(tiny, 3, draft_target_one_model=True), **options)


@pytest.mark.parametrize("max_tokens", range(6, 14))
def test_no_round_is_launched_after_the_last_request_has_ended(tiny: Path, max_tokens: int) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    request = harness.submit(PROMPT, max_tokens)
    harness.run()
    num_rounds = 1 + -(-(max_tokens - 1) // 4)  # the context's, and one for each 4 tokens more
    assert [ids for ids, _ in found] == [[request.request_id]] * num_rounds
    assert request.num_output_tokens == max_tokens
    # Only what may be the end is waited for: the last 4 tokens, be they one round's or those of
    # two.
    assert [in_flight for _, in_flight in found[:-2]] == [0, *[1] * (num_rounds - 3)]


def test_a_request_that_may_end_is_not_waited_for_while_another_continues(tiny: Path) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    short, long = harness.submit(PROMPT, 13), harness.submit([1, *PROMPT], 41)
    harness.run()
    of_short = [in_flight for ids, in_flight in found if short.request_id in ids]
    assert of_short == [0, 1, 1, 1, 1], "the last was one too many"
    of_long = [in_flight for ids, in_flight in found if long.request_id in ids]
    assert len(of_long) == 11 and of_long[1:-2] == [1] * 8


def test_a_waiting_request_gets_the_slot_of_one_that_may_end_without_an_extra_round(
    tiny: Path,
) -> None:
    harness = always_right(tiny, max_batch_size=1)
    found = launches(harness)
    first, second = harness.submit(PROMPT, 13), harness.submit([1, *PROMPT], 5)
    harness.run()
    assert [ids for ids, _ in found] == [[first.request_id]] * 4 + [[second.request_id]] * 2


def test_a_request_that_may_end_is_not_waited_for_where_another_can_join(tiny: Path) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    first = harness.submit(PROMPT, 13)
    while not (first.tokens_in_flight and harness.parts.scheduler.may_be_done()):
        harness.round()
    second = harness.submit([1, *PROMPT], 5)
    harness.run()
    assert len(found) == 6 and found[4] == ([second.request_id, first.request_id], 1)


# Single requests pause drafting while their drafts keep being rejected.


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


# The back-off on rejected drafts, and the warning about them, through the engine.


@pytest.mark.thinned
@pytest.mark.parametrize("adaptive", [None, {"candidate_steps": [4]}])
def test_useless_drafts_are_tried_in_few_rounds_and_the_text_is_the_plain_one(
    tiny: Path, adaptive: dict[str, Any] | None
) -> None:
    prompt = [1, 2, 3]
    params = SamplingParams(max_tokens=100, ignore_eos=True, logit_bias={0: -100.0})
    options = {"max_batch_size": 2, "max_num_tokens": 512, "skip_tokenizer_init": True}
    with LLM(tiny, **options) as plain:
        expected = plain.generate_async(prompt, params).result().outputs[0].token_ids
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": FreeDrafts()}
    config["adaptive"] = adaptive
    with LLM(tiny, speculative_config=config, **options) as llm:
        output = llm.generate_async(prompt, params).result()
    assert output.outputs[0].token_ids == expected
    assert output.speculative_decoding is not None
    # 8 in a row, then one after each pause of 8, 16, 32 ... rounds.
    assert output.speculative_decoding.per_position_drafted[0] == 11
    assert output.speculative_decoding.rounds == 99


def warnings_of(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about useless drafts; `/server_info` shows the same."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    with LLM("zoo:llama", max_num_tokens=512, **options) as llm:
        for _ in range(2):
            llm.generate("import os\n\n\ndef walk(top):\n", params, use_tqdm=False)
        (state,) = llm.server_info()["internal_states"]
    found = [text for text in caplog.messages if "drafts were accepted" in text]
    assert found == ([state["draft_warning"]] if state["draft_warning"] else [])
    return found


def test_drafts_that_are_never_accepted_are_mentioned_once_with_likely_causes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_watch, "MIN_DRAFTS", 50)
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": FreeDrafts()}
    (useless,) = warnings_of({"speculative_config": config | {"max_rejected_rounds": None}}, caplog)
    assert useless.startswith("0 of 52 drafts were accepted") and "request.tokens" in useless
    caplog.clear()
    random = engine("eagle3", 4, load_format="dummy")
    (useless,) = warnings_of(random, caplog)
    assert "load_format dummy" in useless
    caplog.clear()
    assert not warnings_of(engine("eagle3", 4), caplog)
