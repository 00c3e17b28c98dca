"""Rounds of a forward and a tail, in which an EAGLE-3 head on the two-model path drafts: it drafts
in the round that it reads, as the one-model path does, and its rounds overlap."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    count_forwards,
    eagle3,
    one_model,
    submit_traffic,
)
from tests.executor.graph_rounds import DUMMY, Event, with_graphs
from tests.executor.guided_rounds import grammar_of
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.request import RequestState
from tllm_spec.executor.speculative.drafting.drafter import WindowResult

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]


def two_model(head: Path, draft_len: int = 3, **options: Any) -> dict[str, Any]:
    return eagle3(head, draft_len, **{"eagle3_one_model": False} | options)


def watch_windows(harness: Harness) -> dict[tuple[int, int], list[int]]:
    """The bonus token and the real drafts of every window that is launched, by request id and
    length."""
    seen: dict[tuple[int, int], list[int]] = {}
    slots = harness.parts.slots

    def record(batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            num_drafts = min(batch.shape.depth, int(slots.num_drafts[request.slot]))
            assert num_drafts == request.py_num_draft_tokens
            window = slots.window[request.slot, : 1 + num_drafts].tolist()
            seen[request.request_id, request.num_tokens] = window

    before_launch(harness.executor, record)
    return seen


# The windows of the first are those of the second.
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "coupled": ({}, {"eagle3_one_model": True}),
    "greedy": (
        {"draft_sampling": "greedy"},
        {"draft_sampling": "greedy", "eagle3_one_model": True},
    ),
    "outside torch": ({"draft_backend": "onnxruntime"}, {}),
    "outside torch, independent": (
        {"draft_backend": "onnxruntime", "use_rejection_sampling": True},
        {"use_rejection_sampling": True},
    ),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("way", ["overlap", "in_turn", "graphs"])
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["undisturbed", "small_pool"])
@pytest.mark.parametrize("paths", PATHS)
def test_the_windows_are_those_of_the_one_model_path_and_of_a_head_outside_torch(
    tiny: Path, head: Path, eager_graphs: None, options: dict[str, Any], paths: str, way: str
) -> None:
    windows = []
    for speculation in PATHS[paths]:
        own = options | two_model(head, **speculation) | {"max_batch_size": 8}
        own["disable_overlap_scheduler"] = way == "in_turn"
        sizes, lengths = (2, 4), {0, 3}
        harness = (
            with_graphs(tiny, sizes, lengths, **own) if way == "graphs" else Harness(tiny, **own)
        )
        windows.append(watch_windows(harness))
        submit_traffic(harness, Random(4), 14)
        harness.run()
        assert bool(harness.parts.scheduler.num_preemptions) == bool(options)
    assert windows[0] == windows[1]
    assert sum(len(window) == 4 for window in windows[0].values()) > 20


def test_forward_and_tail_are_replayed_before_the_round_before_is_read(
    tiny: Path, head: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_graphs(tiny, (2,), {0, 3}, **two_model(head))
    graphs, events = harness.parts.runner.graphs, list[str]()
    assert graphs is not None and not graphs.whole.captured
    requests = [harness.submit([i, *PROMPT], max_tokens=60) for i in range(2)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.round()
    run, replay, wait = graphs.forwards.run, graphs.tails.replay, ToHost.wait

    def watched_run(*arguments: Any) -> Any:
        events.append("forward")
        return run(*arguments)

    def watched_replay(*arguments: Any) -> Any:
        events.append("tail")
        return replay(*arguments)

    def watched_wait(to_host: ToHost) -> list[torch.Tensor]:
        events.append("read")
        return wait(to_host)

    monkeypatch.setattr(graphs.forwards, "run", watched_run)
    monkeypatch.setattr(graphs.tails, "replay", watched_replay)
    monkeypatch.setattr(ToHost, "wait", watched_wait)
    for lengths, num_rounds in (([3], 4), ([0], 3)):
        harness.parts.tier_for = lambda *_, lengths=lengths: lengths[0]
        del events[:]
        for _ in range(num_rounds):
            harness.round()
            assert len(rounds_in_flight(harness.executor)) == 1
        assert events == ["forward", "tail", "read"] * num_rounds


def test_the_head_drafts_in_the_tail(tiny: Path, head: Path, eager_graphs: None) -> None:
    harness = with_graphs(tiny, (2,), {0, 3}, **two_model(head))
    graphs, rows = harness.parts.runner.graphs, count_forwards(harness)
    assert graphs is not None
    with torch.inference_mode():
        graphs.forwards.run([DUMMY, DUMMY], chain_of(3), False)
        assert rows == []
        graphs.tails.replay([DUMMY, DUMMY], chain_of(3), False)
    assert rows == [2 * 4, 2, 2]  # what the target has read, then two more drafts


def test_a_split_round_is_timed_with_both_parts_in_turn(
    tiny: Path, head: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_graphs(tiny, (2,), {0, 3}, **two_model(head))
    runner, seen = harness.parts.runner, list[tuple[str, int]]()
    decode, lens = runner.decode, harness.parts.slots.kv_lens

    def forward(*arguments: Any) -> torch.Tensor:
        seen.append(("forward", int(lens[DUMMY])))
        return original(*arguments)

    def tail(*arguments: Any) -> WindowResult:
        seen.append(("tail", int(lens[DUMMY])))
        return end(*arguments)

    original, end = runner.engine.forward, decode.sample
    monkeypatch.setattr(runner.engine, "forward", forward)
    monkeypatch.setattr(decode, "sample", tail)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with torch.inference_mode():
        assert runner.seconds(GraphKey(2, chain_of(3), True)) == 0.006 / 5
    names, before = zip(*seen, strict=True)
    assert names == ("forward", "tail") * (1 + 5 + 5)
    assert set(before[1::2]) == {0}  # each round begins with an empty slot


def test_the_masks_of_a_round_do_not_reach_the_next_one(
    tiny: Path, head: Path, eager_graphs: None
) -> None:
    """A guided request ends; the other's rounds go on with the same graphs, as if it were alone."""
    harness, alone = (with_graphs(tiny, (2,), {0, 3}, **two_model(head)) for _ in range(2))
    guided = harness.submit([7, 8], max_tokens=8, grammar=grammar_of("[a-z]*"))
    ours, theirs = (each.submit(PROMPT, max_tokens=40, seed=1) for each in (harness, alone))
    harness.run()
    alone.run()
    assert guided.num_output_tokens == 8 and output_of(ours) == output_of(theirs)


def test_the_host_reports_the_drafts_of_the_round_before(tiny: Path, head: Path) -> None:
    """A longer draft is ready one round after it is asked for, and so is the first one."""
    harness = Harness(tiny, **two_model(head), disable_overlap_scheduler=True)
    request = harness.submit(PROMPT, max_tokens=60)
    reported: list[tuple[int, int]] = []

    def look(batch: ScheduledBatch) -> None:
        if batch.generation_requests:
            reported.append((batch.shape.depth, batch.made_draft_len))
            assert request.py_num_draft_tokens == batch.made_draft_len

    before_launch(harness.executor, look)
    for draft_len in (0, 0, 2, 3, 3, 1, 0, 2):
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
    assert reported == [(0, 0), (2, 0), (3, 2), (3, 3), (1, 1), (0, 0), (2, 0)]


# Overlap on the two-model path. A drafter on the host begins when all rounds were read, and its
# rounds of draft length 0 overlap. A draft model drafts before the round before is read, with the
# same drafts.


OVERLAP_TWO_MODEL_PROMPT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("draft"))


def run_lengths(harness: Harness, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Rounds with these draft lengths. How many rounds are in flight when drafts are made, and
    after each round."""
    for place in range(3):
        harness.submit([place, *OVERLAP_TWO_MODEL_PROMPT], max_tokens=40)
    executor, drafter = harness.executor, harness.parts.drafter
    prepare, in_flight, left = drafter.prepare_draft_tokens, list[int](), list[int]()

    def watched(batch: ScheduledBatch) -> None:
        if batch.shape.depth:
            in_flight.append(len(rounds_in_flight(executor)))
        prepare(batch)

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign] # a spy on this one object
    for draft_len in lengths:
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
        left.append(len(rounds_in_flight(executor)))
    harness.run()
    assert all_pages_are_back(executor)
    return in_flight[: sum(length > 0 for length in lengths) - 1], left


def test_a_draft_model_drafts_before_the_round_before_is_read(tiny: Path, draft: Path) -> None:
    """Also in the round in which drafting resumes."""
    lengths = [3, 3, 3, 0, 0, 3, 0, 2, 3]
    in_flight, left = run_lengths(Harness(tiny, **draft_target(draft, 3)), lengths)
    assert in_flight == [1] * 5 and left == [1] * len(lengths)


SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunks": {"enable_chunked_prefill": True, "max_num_tokens": 40},
    "prefixes": {"kv_cache_config": {"tokens_per_block": 4}},
    "limits": {"max_batch_size": 2},
    "rejection_sampling": {},
}


@pytest.mark.thinned(14)
@pytest.mark.parametrize("temperature", [None, HOT])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", ["draft_target_two_model", "draft_target", "eagle3", "eagle"])
def test_overlap_changes_neither_drafts_nor_acceptance(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, situation: str, temperature: float | None
) -> None:
    """Drafted and accepted drafts of every round of every request."""
    rejects = situation == "rejection_sampling"
    speculation = one_model(tiny_draft, head, mode, use_rejection_sampling=rejects)
    outcomes, texts = [], []
    for off in (False, True):
        options = SITUATIONS[situation] | {"disable_overlap_scheduler": off}
        harness, random = Harness(tiny, **options, **speculation), Random(2)
        shared = [random.randrange(64) for _ in range(21)]
        requests = [
            harness.submit(
                [*shared[: random.randrange(21)], i],
                random.randrange(1, 40),
                temperature=temperature,
                draft_limit=random.choice((0, 1, 3, 3, 3)),
            )
            for i in range(12)
        ]
        harness.run()
        texts.append(list(map(output_of, requests)))
        outcomes.append([request.counters.rounds_by_outcome for request in requests])
    assert texts[0] == texts[1] and outcomes[0] == outcomes[1]
    assert sum(sum(own[1:]) for own in outcomes[0]) > 20
