"""Rounds with grammars overlap and are graphs: the forward is launched before the host reads the
round before, then masks are filled, then the rest is launched. The text is that without both."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from threading import Thread, current_thread
from typing import Any

import pytest

from tests.executor.draft_caches import HOT, SMALL_POOL, random_lengths, with_lengths
from tests.executor.draft_graphs import assert_same
from tests.executor.graph_rounds import MODES, Speculate, on_cuda, replays_of, with_graphs
from tests.executor.guided_rounds import assert_grammatical, events_of, grammar_of, submit_guided
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.overlap_rounds import NO_OVERLAP
from tests.executor.test_budget_graphs import forbid_eager_windows
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.graphs.slot_graphs import SlotGraphs
from tllm_spec.executor.request import RequestState
from tllm_spec.executor.rounds.round_reader import LaunchedRound
from tllm_spec.executor.sampling import grammar_masks
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.request_errors import SLOW_GRAMMAR

SIZES = (1, 4, 8)
SA = {"decoding_type": "SA", "max_draft_len": 3}


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_round_before_is_read_and_masks_are_filled_after_the_forward_is_launched(
    tiny: Path, depth: list[int], monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    harness = with_graphs(tiny, SIZES, {0}) if has_graphs else Harness(tiny)
    events = events_of(harness, monkeypatch)
    harness.submit([3, 14, 15], max_tokens=6, grammar=grammar_of("[a-z]*"))
    harness.run()
    rounds = [["forward 0", "fill 0", "sample 0"]]
    rounds += [[f"forward {i}", f"read {i - 1}", f"fill {i}", f"sample {i}"] for i in range(1, 6)]
    assert events == [*chain(*rounds), "read 5"]


@pytest.mark.parametrize(("num_guided", "in_flight"), [(0, 1), (1, 1), (2, 0), (4, 0)])
def test_rounds_with_drafts_are_read_first_where_half_of_the_requests_have_grammars(
    tiny: Path, num_guided: int, in_flight: int
) -> None:
    """Then drafts follow the grammars."""
    harness, found = Harness(tiny, speculative_config=SA), list[int]()
    for i in range(4):
        grammar = grammar_of("[a-m]*") if i < num_guided else None
        harness.submit([3, 14, 15], 12, seed=i, temperature=HOT, grammar=grammar)

    def look(batch: ScheduledBatch) -> None:
        if len(batch.generation_requests) == 4:
            found.append(len(rounds_in_flight(harness.executor)))
        for request in batch.generation_requests if not in_flight else ():
            drafts = harness.parts.slots.window[request.slot, 1:][: request.py_num_draft_tokens]
            assert request.grammar is None or (drafts < 13).all()

    before_launch(harness.executor, look)
    harness.run()
    assert len(found) > 3 and max(found) == in_flight


@pytest.mark.thinned(16)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_guided_text_is_that_without_graphs_and_overlap(
    tiny: Path,
    speculate: Speculate,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    overlap: bool,
) -> None:
    speculation = speculate(mode)
    options = speculation | ({} if overlap else NO_OVERLAP)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness = with_graphs(tiny, SIZES, lengths, **options)
    eager = Harness(tiny, **speculation, **NO_OVERLAP)
    ours, theirs = submit_guided(harness), submit_guided(eager)
    forbid_eager_windows(harness, monkeypatch, depth)
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert_grammatical(ours)
    assert {len(harness.responses[r.request_id]) for r in ours} == {1}


@pytest.mark.thinned(10)
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_guided_text_does_not_depend_on_draft_lengths_that_change_from_round_to_round(
    tiny: Path, speculate: Speculate, depth: list[int], mode: str, has_graphs: bool
) -> None:
    speculation = speculate(mode)
    harness = with_graphs(tiny, SIZES, {0, 1, 2, 3}, **speculation) if has_graphs else None
    harness, plain = harness or Harness(tiny, **speculation), Harness(tiny, **NO_OVERLAP)
    with_lengths(harness, random_lengths(Random(5)))
    ours, theirs = submit_guided(harness, 12), submit_guided(plain, 12)
    harness.run()
    plain.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", ["plain", "eagle3", "eagle3_two_model"])
def test_rounds_with_a_grammar_are_two_graphs_and_others_where_a_head_drafts_in_the_tail(
    tiny: Path, speculate: Speculate, depth: list[int], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """One guided request ends after a few rounds, and joins again later."""
    lengths = {0} if mode == "plain" else {0, 3}
    harness = with_graphs(tiny, SIZES, lengths, **speculate(mode))
    free = [harness.submit([i, 5, 9], max_tokens=60, seed=i) for i in range(3)]
    kinds, launch = list[tuple[bool, tuple[int, int, int, int]]](), harness.parts.runner.launch
    decode, sent = harness.parts.runner.decode, list[ToHost]()
    make_copy = ToHost.__init__

    def watched_copy(to_host: ToHost, *arguments: Any) -> None:
        sent.append(to_host)
        make_copy(to_host, *arguments)

    def watched(batch: ScheduledBatch) -> LaunchedRound:
        graphs = decode.graphs
        assert graphs is not None
        tables = graphs.whole, graphs.forwards, graphs.tails
        before, num_sent = [num_of(each) for each in tables], len(sent)
        launched = launch(batch)
        counts = [num_of(each) - number for each, number in zip(tables, before, strict=True)]
        if batch.generation_requests and not batch.context_requests:
            is_guided = any(request.grammar for request in batch.generation_requests)
            rounds, forwards, tails = counts
            kinds.append((is_guided, (rounds, forwards, tails, len(sent) - num_sent)))
        return launched

    monkeypatch.setattr(harness.parts.runner, "launch", watched)
    monkeypatch.setattr(ToHost, "__init__", watched_copy)
    for _ in range(2):
        harness.rounds(4)
        guided = harness.submit([7, 8], max_tokens=8, grammar=grammar_of("[a-z]*"))
        harness.run_until(guided, RequestState.FINISHED)
    harness.run()
    assert not any(request.error for request in free)
    num_copies = 0 if mode == "plain" else 1  # of the drafts
    unguided = (0, 1, 1, 0) if mode == "eagle3_two_model" else (1, 0, 0, 0)
    assert set(kinds) == {(False, unguided), (True, (0, 1, 1, num_copies))}
    assert [is_guided for is_guided, _ in kinds].index(True) > 2 and not kinds[-1][0]


def num_of(graphs: SlotGraphs[Any]) -> int:
    return sum(replays_of(graphs).values())


def test_where_grammars_are_refused_rounds_have_no_second_graphs(
    tiny: Path, depth: list[int]
) -> None:
    harness = with_graphs(tiny, SIZES, {0}, guided_decoding_backend=None)
    graphs = harness.parts.runner.graphs
    assert graphs is not None and graphs.whole.captured and graphs.forwards.captured
    assert not graphs.tails.captured and not len(harness.parts.sampler.grammar_masks._for_graphs)
    guided = with_graphs(tiny, SIZES, {0}).parts.runner.graphs
    assert guided is not None and guided.tails.captured


@pytest.mark.thinned(8)
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("mode", ["plain", "eagle3", "eagle3_tree", "draft_target_two_model"])
def test_guided_requests_that_are_preempted_or_cancelled_leave_the_others_text(
    tiny: Path, speculate: Speculate, depth: list[int], mode: str, has_graphs: bool
) -> None:
    options = speculate(mode) | SMALL_POOL
    options |= {"max_batch_size": 8, "max_num_tokens": 80}
    lengths = {0, 1, 2, 3} if mode != "plain" else {0}
    harness = with_graphs(tiny, (1, 2, 4), lengths, **options) if has_graphs else None
    harness = harness or Harness(tiny, **options)
    alone = Harness(tiny, **speculate(mode), **NO_OVERLAP)
    requests, expected = submit_guided(harness, 12), submit_guided(alone, 12)
    number = 0
    while harness.round():
        harness.executor.check_integrity()
        number += 1
        running = harness.parts.scheduler.running
        if number % 15 == 0 and running:
            harness.queue.cancel(running[0].request_id)
    alone.run()
    assert harness.parts.scheduler.num_preemptions
    cancelled = [request.finish_reason == "cancelled" for request in requests]
    assert 0 < sum(cancelled) < 8 and any(cancelled[::2])
    for mine, other, is_cancelled in zip(requests, expected, cancelled, strict=True):
        own, whole = output_of(mine), output_of(other)
        assert own == (whole[: len(own)] if is_cancelled else whole)
        assert mine.error is None
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned
@pytest.mark.parametrize("has_graphs", [False, True])
def test_masks_of_many_requests_are_filled_in_threads(
    tiny: Path,
    speculate: Speculate,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    has_graphs: bool,
) -> None:
    options = speculate("eagle3")
    alone = Harness(tiny, **options)
    expected = submit_guided(alone)
    alone.run()
    monkeypatch.setattr(grammar_masks, "MIN_FOR_THREADS", 2)
    harness = with_graphs(tiny, SIZES, {0, 3}, **options) if has_graphs else None
    harness = harness or Harness(tiny, **options)
    threads, fill = set[Thread](), GrammarState.fill

    def watched(*arguments: Any) -> Any:
        threads.add(current_thread())
        return fill(*arguments)

    monkeypatch.setattr(GrammarState, "fill", watched)
    requests = submit_guided(harness)
    harness.run()
    assert_same(requests, expected)
    assert len(threads) > 2


@pytest.mark.thinned(4)
@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_request_whose_grammar_is_at_a_limit_fails_alone(
    tiny: Path,
    speculate: Speculate,
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    has_graphs: bool,
    in_threads: bool,
) -> None:
    """No round is run again: the other requests are not restarted."""
    monkeypatch.setattr(grammar_masks, "MIN_FOR_THREADS", 2 if in_threads else 100)
    options = speculate("eagle3")
    harness = with_graphs(tiny, SIZES, {0, 3}, **options) if has_graphs else None
    harness, alone = harness or Harness(tiny, **options), Harness(tiny, **options)
    requests, expected = submit_guided(harness), submit_guided(alone)
    slow, write, refused = requests[4], GrammarState._write, list[str]()
    assert slow.grammar is not None
    slow.grammar._grammar = replace(slow.grammar._grammar, refuse=refused.append)

    def limited(state: GrammarState, row: Any) -> bool:
        if state is slow.grammar and slow.num_output_tokens > 3:
            state._matcher.consume_tokens([-1 % 2**31])  # no such token: it is at its end
        return write(state, row)

    alone.run()
    monkeypatch.setattr(GrammarState, "_write", limited)
    monkeypatch.setattr(harness.executor, "_restart", lambda request: pytest.fail("a restart"))
    harness.run()
    assert slow.error == SLOW_GRAMMAR and slow.finish_reason == "error"
    assert output_of(slow) == output_of(expected[4])[: slow.num_output_tokens]
    assert refused == [SLOW_GRAMMAR]
    others = [i for i in range(8) if i != 4]
    assert [output_of(requests[i]) for i in others] == [output_of(expected[i]) for i in others]
    assert not any(requests[i].error for i in others)
    assert {len(harness.responses[r.request_id]) for r in requests} == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_guided_text_is_that_without_graphs_and_overlap(
    tiny: Path, speculate: Speculate, mode: str
) -> None:
    speculation = speculate(mode)
    harness = on_cuda(tiny, list(SIZES), **speculation)
    eager = on_cuda(tiny, None, **speculation, **NO_OVERLAP)
    ours, theirs = submit_guided(harness), submit_guided(eager)
    harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert_grammatical(ours)
