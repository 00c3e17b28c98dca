"""CUDA graphs of what drafts before the target's forward: which rounds are two launches and nothing
else, and that drafts and texts are those of eager rounds."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.executor.draft_caches import HOT, SMALL_POOL, pools_of, submit_traffic
from tests.executor.draft_graphs import (
    DUMMY,
    MODES,
    Watched,
    assert_same,
    two_model,
    watch,
    with_graphs,
)
from tests.executor.graph_rounds import on_cuda, replays_of, submit_mixture
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.test_split_rounds import watch_windows
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.executor.graphs.slot_graphs import Captured, GraphKey, SlotGraphs
from tllm_spec.executor.request import RequestState
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter

FREE_OPS = {
    "slice",
    "select",
    "unsqueeze",
    "view",
    "alias",
    "resolve_conj",
    "resolve_neg",
}  # no launch


Pair = Callable[..., tuple[Watched, Harness]]


@pytest.fixture
def pair(
    tiny: Path, drafts: tuple[Path, Path], depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> Pair:
    """Makes an engine of a mode with graphs of these sizes and draft lengths, and an eager one."""

    def make(
        mode: str, sizes: tuple[int, ...], draft_lens: set[int], *, pads: bool = True, **own: Any
    ) -> tuple[Watched, Harness]:
        options = two_model(drafts, mode, **own)
        watched = with_graphs(monkeypatch, tiny, sizes, draft_lens, pads=pads, **options)
        return watched, Harness(tiny, **options)

    return make


def run_with_cancellations(harness: Harness) -> None:
    """Until all requests have ended, some of them cancelled."""
    random = Random(1)
    while harness.round():
        running = harness.parts.scheduler.running
        if running and random.random() < 0.2:
            harness.queue.cancel(random.choice(running).request_id)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("mode", "rejects"), list(product(MODES, (False, True))), ids=str)
def test_the_drafts_of_graphs_are_those_without(
    pair: Pair, mode: str, rejects: bool, is_sampled: bool
) -> None:
    """Batches below a captured size, limits of single requests, ends one by one."""
    watched, eager = pair(mode, (1, 4, 8), {3}, use_rejection_sampling=rejects)
    windows = [watch_windows(each) for each in (watched.harness, eager)]
    ours, theirs = (submit_mixture(each, 7, is_sampled) for each in (watched.harness, eager))
    watched.harness.run()
    eager.run()
    assert_same(ours, theirs)
    assert windows[0] == windows[1] and sum(len(window) == 4 for window in windows[0].values()) > 20
    assert {key.batch_size for key in watched.replays()} == {1, 4, 8}
    assert any(key.sampled for key in watched.replays()) == is_sampled
    assert watched.eager == ([7] if mode == "eagle3" else [])  # after the prompts


class OpCounter(TorchDispatchMode):
    """Ops that launch something while no stand-in replays."""

    def __init__(self, depth: list[int]) -> None:
        super().__init__()
        self._depth = depth
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self._depth and name not in FREE_OPS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_a_steady_round_is_two_launches_and_nothing_else(
    tiny: Path,
    drafts: tuple[Path, Path],
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    options = {"kv_cache_config": {"tokens_per_block": 128}} | two_model(drafts, mode)
    watched = with_graphs(monkeypatch, tiny, (4,), {3}, **options)
    harness = watched.harness
    requests = [harness.submit([5, i], max_tokens=100) for i in range(3)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.rounds(3)
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    others: SlotGraphs[Any] = graphs.whole if mode == "draft_target" else graphs.forwards
    before, others_before = watched.replays(), replays_of(others)
    with OpCounter(depth) as ops:
        harness.rounds(6)
    key = GraphKey(4, chain_of(3), False)
    assert watched.replays() == {key: before[key] + 6}
    assert replays_of(others)[key] == others_before[key] + 6
    assert not ops.names


def test_padding_of_a_draft_model_writes_into_no_requests_pages(
    tiny: Path, drafts: tuple[Path, Path], depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_cache_config": {"tokens_per_block": 4}} | two_model(drafts, "draft_target")
    watched = with_graphs(monkeypatch, tiny, (8,), {3}, **options)
    harness, drafter = watched.harness, watched.harness.parts.drafter
    assert isinstance(drafter, ModelDrafter)
    kv = drafter._kv
    requests = [harness.submit([5, i], max_tokens=30) for i in range(2)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    for _ in range(5):
        own = {0} | {page for request in requests for page in kv.cache.pages(request.request_id)}
        foreign = [page for page in range(kv.cache.groups[0].num_pages) if page not in own][
            8:
        ]  # some are taken next
        before = kv.groups[0].pools[0].data[:, :, foreign].clone()
        harness.round()
        assert torch.equal(kv.groups[0].pools[0].data[:, :, foreign], before)
        assert not kv.groups[0].table.device_rows[DUMMY].any()
    assert sum(watched.replays().values()) >= 5


@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_the_draft_length_is_drafted_for_in_graphs(pair: Pair, mode: str) -> None:
    watched, eager = pair(mode, (1,), {1, 3})
    windows = [watch_windows(each) for each in (watched.harness, eager)]
    requests = []
    for harness in (watched.harness, eager):
        lengths = iter([3, *[3] * 5, *[1] * 4, *[0] * 3, *[3] * 100])
        harness.parts.tier_for = lambda *_, lengths=lengths: next(lengths)
        requests.append([harness.submit([7, 8, 9], max_tokens=60)])
        harness.run()
    assert_same(*requests)
    assert windows[0] == windows[1]
    seen = {len(window) for window in windows[0].values()}
    assert {1, 2, 4} <= seen
    prompt, lengths = ([], {1, 3}) if mode == "draft_target" else ([1], {0, 1, 3})
    assert watched.eager == prompt and {key.shape.depth for key in watched.replays()} == lengths


def test_a_draft_model_needs_a_graph_of_the_rounds_own_draft_length(pair: Pair) -> None:
    watched, _ = pair("draft_target", (1,), {3})
    harness = watched.harness
    windows = watch_windows(harness)
    harness.submit([7, 8, 9], max_tokens=4)  # its rounds have more drafts than it can emit
    harness.run()
    assert {len(window) for window in windows.values()} == {4}
    assert watched.replays()[GraphKey(1, chain_of(3), False)] >= 1 and watched.eager == []
    before = watched.replays()
    harness.parts.tier_for = lambda *_: 2
    harness.submit([7, 8, 9], max_tokens=20)
    harness.run()
    assert watched.replays() == before and len(watched.eager) > 3


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("pads", "number", "own"), [(True, 3, {}), (False, 1, {}), (True, 1, {"presence_penalty": 0.5})]
)
def test_what_fits_no_graph_is_drafted_eagerly(
    pair: Pair, pads: bool, number: int, own: dict[str, float], mode: str
) -> None:
    """Above the largest size, between two, and with rules that a graph does not have."""
    watched, eager = pair(mode, (2,), {3}, pads=pads)
    ours, theirs = (
        [each.submit([i, 5], max_tokens=16, temperature=HOT, **own) for i in range(number)]
        for each in (watched.harness, eager)
    )
    watched.harness.run()
    eager.run()
    assert_same(ours, theirs)
    if own:  # a draft model ignores penalties; a head drafts in the tail, which is eager with them
        assert bool(watched.replays()) == (mode == "draft_target") == (not watched.eager)
    else:
        assert watched.eager.count(number) >= 3 and (pads or not watched.replays())


@pytest.mark.gpu
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_the_drafts_of_graphs_are_those_without(
    tiny: Path,
    drafts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    is_sampled: bool,
) -> None:
    """Batches are below a captured size, and requests end; the text is plain decoding's."""
    speculation = two_model(drafts, mode)
    harness, eager = (on_cuda(tiny, [1, 4, 8], **speculation), on_cuda(tiny, None, **speculation))
    plain, watched = on_cuda(tiny, None), watch(harness, monkeypatch)
    windows = [watch_windows(each) for each in (harness, eager)]
    num_replayed, graphs = list[int](), watched.graphs
    run = graphs.run

    def spy(slots: list[int], shape: DraftShape, sampled: bool) -> Captured[Any] | None:
        found = run(slots, shape, sampled)
        num_replayed.extend([len(slots)] * (found is not None))
        return found

    monkeypatch.setattr(graphs, "run", spy)
    ours, theirs, expected = (
        submit_mixture(each, 7, is_sampled) for each in (harness, eager, plain)
    )
    for each in (harness, eager, plain):
        each.run()
    assert_same(ours, theirs)
    assert windows[0] == windows[1] and list(map(output_of, ours)) == list(map(output_of, expected))
    assert len(num_replayed) > 10 and {1, 3} <= set(num_replayed)
    assert watched.eager == ([7] if mode == "eagle3" else [])
    assert all_pages_are_back(harness.executor)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_traffic_that_is_cancelled_and_preempted_is_plain_decodings(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    options = SMALL_POOL | {"max_num_tokens": 40, "max_batch_size": 8}
    plain = on_cuda(tiny, None)
    harness = on_cuda(tiny, [2, 8], **options, **two_model(drafts, mode))
    expected, requests = (submit_traffic(each, Random(1), 24) for each in (plain, harness))
    plain.run()
    run_with_cancellations(harness)
    for ours, theirs in zip(requests, expected, strict=True):
        assert output_of(ours) == output_of(theirs)[: len(output_of(ours))]
    assert harness.parts.scheduler.num_preemptions and all_pages_are_back(harness.executor)
    assert all(pool.data.isfinite().all() for pool in pools_of(harness))
