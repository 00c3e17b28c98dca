"""Rounds without drafts inside the forward: a head reads many of them at once, a model whatever
there is when drafts are wanted again, and its cache then is what it would have been."""

from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    assert_cached_pages_are_whole,
    assert_nothing_is_missing,
    assert_texts_are,
    count_forwards,
    generating,
    network_of,
    one_model,
    pools_of,
    random_lengths,
    spoil_free_pages,
    submit_traffic,
    with_lengths,
)
from tests.executor.graph_rounds import capture_rounds
from tests.executor.harness import Harness, all_pages_are_back, output_of, user_provided
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building.engines import load_draft
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.slot_graphs import Captured, SlotGraphs, graph_keys
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN, DraftBacklog
from tllm_spec.models.eagle3 import Eagle3Head

MODES = ["draft_target", "eagle3", "eagle3_two_model", "eagle3_onnxruntime", "eagle"]
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
PAGES = {"kv_cache_config": {"tokens_per_block": 4}}
NO_OVERLAP = {"disable_overlap_scheduler": True}
MAY_PAUSE = {"draft_len_schedule": {1: 3, 2: 0}}


@pytest.fixture(params=MODES)
def speculation(
    request: pytest.FixtureRequest, tiny_draft: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """A mode whose draft network has the target's pages, and whose rounds may have no drafts."""
    # The head in torch is the reference of the one outside.
    monkeypatch.setattr(Eagle3Head, "leave_fuse", lambda _: None)
    return one_model(tiny_draft, head, request.param, **MAY_PAUSE)


def waits_long(harness: Harness) -> bool:
    """A draft model, which reads nothing but tokens."""
    return backlog_of(harness).max_unread == inf


def backlog_of(harness: Harness) -> DraftBacklog:
    return network_of(harness)._backlog


@pytest.mark.thinned(5)
@pytest.mark.parametrize("overlap", [True, False])
def test_plain_rounds_share_one_forward_of_the_draft_network(
    tiny: Path, speculation: dict[str, Any], overlap: bool
) -> None:
    harness = Harness(tiny, **speculation, **({} if overlap else NO_OVERLAP))
    with_lengths(harness, 0)
    rows = count_forwards(harness)
    harness.submit(PROMPT, max_tokens=150)
    harness.round()
    del rows[:]
    forwards: list[list[int]] = []
    for _ in range(3 * BACKLOG_LEN + 2):
        harness.round()
        forwards.append(rows[:])
        del rows[:]
    is_model = waits_long(harness)
    full = [] if is_model else [BACKLOG_LEN * count for count in (1, 2, 3)]
    assert [number for number, each in enumerate(forwards) if each] == full
    assert [each for each in forwards if each] == [[BACKLOG_LEN]] * len(full)
    # The round that drafts again: what waits, then its own window and the drafts after the first.
    with_lengths(harness, 3)
    harness.round()
    what_left_the_ring = [2 * BACKLOG_LEN + 2] if is_model else []
    assert rows == [*what_left_the_ring, BACKLOG_LEN, 4, 1, 1]
    del rows[:]
    harness.round()
    assert rows == [4, 1, 1]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_draft_cache_lacks_only_the_positions_of_the_backlog(
    tiny: Path, speculation: dict[str, Any], seed: int, overlap: bool
) -> None:
    """With joins, context chunks next to windows, prefix hits, preemption, cancellation and
    unforeseen ends."""
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 92}}
    options = SMALL_POOL | pool | ({} if overlap else NO_OVERLAP)
    plain, harness = Harness(tiny, **options), Harness(tiny, **options, **speculation)
    expected, requests = (submit_traffic(each, Random(seed), 40) for each in (plain, harness))
    plain.run()
    assert backlog_of(harness).max_requests == 1 < SMALL_POOL["max_batch_size"]
    random = Random(seed)
    with_lengths(harness, random_lengths(random))
    preempt, seen = harness.parts.scheduler._preempt, set[str]()

    def watched(victim: LlmRequest, *others: Any) -> None:
        seen.update(["preempted"] if victim.draft_backlog > 2 else [])
        preempt(victim, *others)

    harness.parts.scheduler._preempt = watched  # type: ignore[method-assign] # the test looks on
    spoil_free_pages(harness)
    for number in range(10_000):
        if not harness.round():
            break
        spoil_free_pages(harness)
        assert_cached_pages_are_whole(harness)
        running = generating(harness)
        for request in running:
            assert request.draft_backlog <= backlog_of(harness).max_unread
        if number % 2 == 0:
            begun = [request for request in running if request.num_output_tokens]
            assert_nothing_is_missing(harness, *begun)
        waiting = {request.draft_backlog for request in running}
        seen.update(
            ["full"] if BACKLOG_LEN in waiting else [],
            ["different"] if len(waiting - {0}) > 1 else [],
        )
        if running and random.random() < 0.01:
            harness.queue.cancel(random.choice(running).request_id)
    assert seen == {"preempted", "full", "different"}
    assert sum(request.cached_tokens for request in requests) > 40
    assert_texts_are(requests, expected)
    assert sum(sum(request.counters.by_accepted[1:]) for request in requests) > 0
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(3)
def test_catching_up_writes_the_positions_of_the_backlog_and_no_others(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    harness = Harness(tiny, **PAGES, **NO_OVERLAP, **speculation)
    with_lengths(harness, 0)
    requests = []
    for prompt, rounds in (
        ([5], 3),
        (PROMPT, 4),
        (PROMPT[::-1], 1),
    ):  # the first begins before its window
        requests.append(harness.submit(prompt, max_tokens=60))
        harness.rounds(rounds)
    assert [request.draft_backlog for request in requests] == [7, 4, 0]
    for pool in pools_of(harness):
        pool.data[:, :, 0] = 0.0
    before = [pool.data.clone() for pool in pools_of(harness)]
    with torch.inference_mode():
        backlog_of(harness).read(requests)
    target, draft = (
        set(map(tuple, (pool.data != old).any(-1).any(-1).any(0).any(0).nonzero().tolist()))
        for pool, old in zip(pools_of(harness), before, strict=True)
    )
    after = 1 - network_of(harness).net.lookahead
    cache = harness.parts.kv.cache
    due = {
        (cache.pages(request.request_id)[position // 4], position % 4)
        for request, waiting in zip(requests, (7, 4, 0), strict=True)
        for position in range(request.kv_len + after - waiting, request.kv_len + after)
    }
    assert not target and {(page, offset) for page, offset in draft if page} == due
    assert [request.draft_backlog for request in requests] == [0, 0, 0]
    assert_nothing_is_missing(harness, *requests)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "num_plain", [1, BACKLOG_LEN - 1, BACKLOG_LEN, BACKLOG_LEN + 1, 3 * BACKLOG_LEN + 2]
)
def test_a_reusable_prefix_ends_where_the_draft_layers_have_read(
    tiny: Path, speculation: dict[str, Any], num_plain: int
) -> None:
    for ending in ("length", "surprise"):  # the latter leaves one round too many in flight
        harness = Harness(tiny, **PAGES, **speculation)
        with_lengths(harness, 0)
        rules: dict[str, Any] = {"max_tokens": num_plain + 1}
        if ending == "surprise":
            probe = Harness(tiny)
            text = probe.submit(PROMPT, max_tokens=num_plain + 1, temperature=HOT, seed=8)
            probe.run()
            if text.tokens[-1] in text.tokens[text.prompt_len : -1]:
                continue
            rules = {"max_tokens": 150, "stop_token_ids": [text.tokens[-1]]}
        first = harness.submit(PROMPT, temperature=HOT, seed=8, **rules)
        harness.run()
        assert first.num_output_tokens == num_plain + 1
        expected = len(PROMPT)
        if not waits_long(harness):  # the rings were read each time that they were full
            num_rounds = num_plain + (ending == "surprise")
            expected += (num_rounds - 1) // BACKLOG_LEN * BACKLOG_LEN
        # A draft model has read the token after the prompt, too. A round in flight counts as one
        # token that is not read.
        expected += waits_long(harness) - (ending == "surprise")
        assert harness.parts.kv.cache.match([*first.tokens, 1, 2]) == expected
        spoil_free_pages(harness)
        with_lengths(harness, 3)
        second = harness.submit([*first.tokens, 1, 2], max_tokens=3)
        rows = count_forwards(harness)
        harness.round()
        # A draft model reads the prompt's first sampled token in the same forward.
        assert rows[0] == second.prompt_len - expected + waits_long(harness)
        assert_nothing_is_missing(harness, second)
        while harness.round():
            if second.num_output_tokens and second in generating(harness):
                assert_nothing_is_missing(harness, second)
        assert second.cached_tokens == expected


@pytest.mark.thinned(11)
@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_round_that_breaks_off_leaves_no_hole_in_the_draft_cache_and_adds_nothing_to_the_backlog(
    tiny: Path, speculation: dict[str, Any], draft_len: int
) -> None:
    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 5:
            raise KeyError("not today")
        return logits

    harness = Harness(tiny, **PAGES, **speculation)
    with_lengths(harness, draft_len)
    requests = [harness.submit([i, *PROMPT], max_tokens=120) for i in (1, 2)]
    harness.rounds(5)
    bad = harness.submit([1, 2, 3], max_tokens=9, logits_processor=fail)
    while not bad.is_finished:
        harness.round()
    assert bad.error == "KeyError: 'not today'"
    for number in range(24):
        harness.round()
        if number == 20:
            with_lengths(harness, 3)
        assert_nothing_is_missing(harness, *requests)


@pytest.mark.thinned(3)
def test_a_request_whose_logits_are_nan_does_not_harm_the_backlog_of_others(
    tmp_path: Path, speculation: dict[str, Any]
) -> None:
    """Its position, without a token after it, is in the backlog when the others' rings are full and
    the host has not read its last round yet."""
    harness = Harness(write_tiny_llama(tmp_path, nan_token=63), **PAGES, **speculation)
    with_lengths(harness, 0)
    request = harness.submit(PROMPT, max_tokens=40, logit_bias={63: -100.0})
    harness.rounds(BACKLOG_LEN - 1)
    bad = harness.submit([5], max_tokens=9, logit_bias={63: 100.0})
    harness.round()
    harness.round()
    assert (request.draft_backlog, bad.draft_backlog, bad.is_finished) == (BACKLOG_LEN, 1, False)
    harness.round()
    expected = BACKLOG_LEN + 1 if waits_long(harness) else 1
    assert (request.draft_backlog, bad.is_finished) == (expected, True) and "numbers" in str(
        bad.error
    )
    assert_nothing_is_missing(harness, request)
    harness.run()
    assert request.num_output_tokens == 40 and not request.error


@pytest.mark.thinned(3)
def test_padding_rows_write_to_the_dummy_page_also_for_an_empty_slot(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    """Slot 8 is the dummy slot, with length 0; the window of slot 2 begins before position 0."""
    harness = Harness(tiny, **PAGES, **speculation)
    table = harness.parts.kv.groups[0].table.device_rows
    table[2, :2] = torch.tensor([7, 9])
    windows = Windows(
        slots=torch.tensor([8, 2]),
        first=torch.tensor([-4, 1]),
        token_ids=torch.zeros((2, 4), dtype=torch.int64),
        max_kv_len=8,
        num_padding=torch.tensor([4, 1]),
    )
    metadata, _ = harness.parts.runner.engine.rows.build([], windows)
    assert metadata.kv_lens.tolist() == [1, 5]
    assert metadata.positions.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert metadata.kv_slots.tolist() == [0, 0, 0, 0, 1, 30, 31, 36]
    assert metadata.block_tables.tolist() == [[0, 0], [7, 9]]


@pytest.mark.thinned(3)
def test_with_a_fixed_draft_length_rounds_are_plain_while_no_request_wants_drafts(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    """The draft network reads the backlog of such rounds when a request that wants drafts joins, in
    the round that drafts for it."""
    del speculation["speculative_config"]["draft_len_schedule"]
    harness = Harness(tiny, **PAGES, **speculation)
    widths: list[int] = []
    launch = harness.parts.runner.launch

    def watched(batch: Any) -> Any:
        widths.append(batch.shape.window if batch.generation_requests else 0)
        return launch(batch)

    harness.parts.runner.launch = watched  # type: ignore[method-assign] # the test looks on
    request = harness.submit(PROMPT, max_tokens=60, draft_limit=0)
    harness.rounds(BACKLOG_LEN + 5)
    assert widths == [0, *[1] * (BACKLOG_LEN + 4)]
    assert request.draft_backlog == (BACKLOG_LEN + 4 if waits_long(harness) else 4)
    other = harness.submit([5, *PROMPT], max_tokens=30)
    harness.run_until(other, RequestState.GENERATION)
    while request.draft_backlog:
        harness.round()
    harness.round()
    assert widths[-2:] == [1, 1 + speculation["speculative_config"]["max_draft_len"]]
    assert_nothing_is_missing(harness, request)
    harness.run()
    assert (request.num_output_tokens, other.num_output_tokens) == (60, 30)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_len_schedule": {1: 3, 4: 1}},
        {"draft_len_schedule": {1: 3, 8: 0}},
        {"draft_len_schedule": {1: 3, 9: 0}},  # max_batch_size is 8
        {"max_concurrency": 4},
        {"adaptive": {"candidate_steps": [1, 3]}},
        {"adaptive": {"candidate_steps": [0, 3]}},
        {"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": 4},
    ],
)
def test_memory_is_reserved_for_the_backlog_and_its_graphs(
    tiny: Path, tiny_draft: Path, head: Path, options: dict[str, Any]
) -> None:
    reserved = []
    speculations = [
        user_provided(lambda _: [], 3),
        one_model(tiny_draft, head, "eagle3", **options),
    ]
    for speculation in speculations:
        harness = Harness(tiny, **speculation)
        sizes: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 256}
        plans = [
            BuildPlan(LlmArgs.from_kwargs(tiny, cuda_graph_config=graphs, **sizes, **speculation))
            for graphs in (None, {})
        ]
        draft = None
        if plans[0].draft_plan is not None:
            draft = load_draft(
                plans[0], harness.parts.runner.engine.model, plans[0].draft_plan, None
            )
        reserved.append(reserved_bytes(plans[0], draft, ()))
    backlog = backlog_of(harness)
    assert backlog._rings.states is not None and draft is not None
    rings = (backlog._rings.tokens, backlog._rings.states, backlog._num_due)
    assert reserved[1] - reserved[0] == sum(ring.nbytes for ring in rings)
    keys = plans[1].round_keys(plans[1].graph_sizes)
    # Whole rounds, their forwards alone, which are not sampled, and what follows.
    of_rounds = len(keys) + len(keys) // 2 + len(keys)
    of_reading = len({key.batch_size for key in keys})
    words = plans[1].config.hidden_size + 1 + 64 // 32  # a hidden state, a mask and its number
    left_bytes = max(key.num_tokens for key in keys) * words * 4
    of_graphs = (of_rounds + of_reading) * BYTES_A_GRAPH
    assert reserved_bytes(plans[1], draft, ()) - reserved[1] == of_graphs + left_bytes


# A draft network that catches up in a CUDA graph writes what it writes without one.


DRAFT_BACKLOG_GRAPHS_MODES = ["draft_target", "eagle3", "eagle3_two_model"]
ON_CPU = [*DRAFT_BACKLOG_GRAPHS_MODES, "eagle3_onnxruntime"]
PAUSES = {"draft_len_schedule": {1: 3, 5: 0}}


def captured(harness: Harness, sizes: tuple[int, ...], *, pads: bool = True) -> Harness:
    capture_rounds(harness, graph_keys(sizes, lambda _: {0, 3}), pads=pads)
    return harness


def catch_ups_of(harness: Harness) -> SlotGraphs[None]:
    backlog = network_of(harness)._backlog
    assert backlog is not None and backlog._graphs is not None
    return backlog._graphs


def watch_catch_ups(harness: Harness) -> list[tuple[int, bool]]:
    """How many requests catch up at a time, and whether a graph does it."""
    graphs = catch_ups_of(harness)
    replay, seen = graphs.run, list[tuple[int, bool]]()

    def watched(slots: list[int], *key: Any) -> Captured[None] | None:
        found = replay(slots, *key)
        seen.append((len(slots), found is not None))
        return found

    graphs.run = watched  # type: ignore[method-assign] # a spy on this one object
    return seen


def sizes_of(mode: str) -> set[int]:
    """A model reads when 4 are left and drafts are wanted again; a head while there are 7, too."""
    return {4} if mode == "draft_target" else {4, 7}


def run_in_step(harnesses: list[Harness], sampled: bool) -> list[list[LlmRequest]]:
    """From 7 requests to 3 and back to 6 and down to 1, so that rounds are plain and draft in
    turn."""
    requests: list[list[LlmRequest]] = [[] for _ in harnesses]
    for number in range(150):
        joining = {0: (22, 25, 28, 31, 70, 75, 120), 45: (20, 40, 40)}.get(number, ())
        for harness, own in zip(harnesses, requests, strict=True):
            for i, max_tokens in enumerate(joining):
                temperature = HOT if sampled and i % 2 else None
                own.append(
                    harness.submit([i + number, 5, i], max_tokens, temperature=temperature, seed=i)
                )
            harness.round()
    assert all(request.is_finished for own in requests for request in own)
    return requests


def assert_alike(ours: list[LlmRequest], theirs: list[LlmRequest]) -> None:
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_drafted == other.counters.by_drafted
        assert mine.counters.by_accepted == other.counters.by_accepted
    assert sum(sum(request.counters.by_drafted[1:]) for request in ours) > 20


@pytest.mark.thinned(4)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ON_CPU)
def test_a_captured_catch_up_writes_what_an_eager_one_writes(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str, sampled: bool
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    harness, eager = captured(Harness(tiny, **speculation), (1, 4, 8)), Harness(tiny, **speculation)
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled))
    assert {size for size, _ in seen} >= sizes_of(mode) and all(in_graph for _, in_graph in seen)
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ON_CPU)
def test_no_catch_up_has_more_rows_than_a_round_may_have(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    narrow: dict[str, Any] = speculation | {"max_num_tokens": 40}
    harness, eager = captured(Harness(tiny, **narrow), (1, 2, 8)), Harness(tiny, **speculation)
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled=False))
    odd = set() if mode == "draft_target" else {(1, True)}
    assert set(seen) == odd | {(2, True)}
    assert {key.batch_size for key in catch_ups_of(harness).captured} == {1, 2}


def test_a_catch_up_that_fits_no_graph_runs_without(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None
) -> None:
    speculation = one_model(tiny_draft, head, "eagle3", **PAUSES)
    harness, eager = (
        captured(Harness(tiny, **speculation), (4, 8), pads=False),
        Harness(tiny, **speculation),
    )
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled=False))
    assert {in_graph for _, in_graph in seen} == {True, False}
    assert all((size in (4, 8)) == in_graph for size, in_graph in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", DRAFT_BACKLOG_GRAPHS_MODES)
def test_on_a_gpu_a_replayed_catch_up_is_the_eager_one(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, sampled: bool
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    harness, eager = (
        Harness(tiny, device="cuda", cuda_graph_config=graphs, **speculation)
        for graphs in ({"batch_sizes": [1, 4, 8]}, None)
    )
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled))
    assert {size for size, _ in seen} >= sizes_of(mode) and all(in_graph for _, in_graph in seen)
    assert all_pages_are_back(harness.executor)
