"""Draft trees through the engine: every round's tree and accepted path are those of a slow
reference, plain Python over paths, with one prefill for each request."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    TREE,
    SlowDrafter,
    count_forwards,
    generating,
    one_model,
    slow_drafters,
)
from tests.executor.graph_rounds import DUMMY, graphs_of, with_graphs
from tests.executor.harness import Harness, output_of
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.request import LlmRequest
from tllm_spec.kernels.sampling.gumbel import gumbel_noise
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.text.tokenizer import load_tokenizer

PROMPT = [7, 3, 5, 11, 3, 5, 2, 3]
MODES = ["draft_target_tree", "eagle3_tree", "eagle3_two_model_tree", "eagle_tree"]
SMALL_PAGES = {"kv_cache_config": {"tokens_per_block": 4}}


class Candidate(NamedTuple):
    path: tuple[int, ...]
    score: float


def children(
    drafter: SlowDrafter, harness: Harness, request: LlmRequest, parent: Candidate, topk: int
) -> list[Candidate]:
    """The best next tokens, and the probabilities of their paths."""
    scores, ids, temperature = drafter.after(parent.path), drafter._map, request.rules.temperature
    if temperature:
        position = torch.tensor([request.num_tokens + len(parent.path)])
        noise = gumbel_noise(torch.tensor([request.seed]), position, harness.vocab_size)[0]
        scores = scores / temperature + (noise if ids is None else noise[ids])
    probs = scores.softmax(0)
    best = sorted(range(len(scores)), key=lambda i: -float(scores[i]))[:topk]
    return [
        Candidate((*parent.path, i if ids is None else int(ids[i])), parent.score * float(probs[i]))
        for i in best
    ]


def slow_tree(
    children_of: Callable[[Candidate], list[Candidate]], topk: int, depth: int, num_nodes: int
) -> list[tuple[int, ...]]:
    """The paths to the nodes, in their order."""
    beams, found = [Candidate((), 1.0)], list[Candidate]()
    for _ in range(depth):
        new = [each for beam in beams for each in children_of(beam)]
        found += new
        beams = sorted(new, key=lambda each: -each.score)[:topk]
    best = sorted(range(len(found)), key=lambda i: -found[i].score)[:num_nodes]
    return [found[i].path for i in sorted(best)]


def paths_in_slot(harness: Harness, request: LlmRequest) -> list[tuple[int, ...]]:
    slots, slot_id = harness.parts.slots, torch.tensor([request.slot])
    tree = slots.tree(slot_id, slots.shapes.longest)
    assert tree is not None
    tokens = slots.window[request.slot].tolist()
    parents = slots.parents(slot_id, len(tokens))[0].tolist()
    assert tokens[0] == request.tokens[-1]
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert tree.depths[0].tolist() == list(map(len, paths))
    return paths[1:]


def accepted_path(paths: list[tuple[int, ...]], text: list[int]) -> int:
    """How many tokens of `text` are a path of the tree."""
    return max((n for n in range(len(text) + 1) if n == 0 or tuple(text[:n]) in paths), default=0)


def submit_three(harness: Harness, max_tokens: int = 24) -> list[LlmRequest]:
    return [
        harness.submit([i, *PROMPT], max_tokens, temperature=temperature, seed=i)
        for i, temperature in enumerate((None, HOT, 0.7))
    ]


def test_synthetic_acceptance_of_trees_is_by_depth_and_rank(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    """Every node has the children that the rates ask for."""
    rates = [[0.5, 0.2, 0.1], [0.6, 0.3]]
    options = {"max_total_draft_tokens": 12, "synthetic_acceptance_rates": rates}
    speculation = one_model(tiny_draft, head, "draft_target_tree", 2, **options)
    harness = Harness(tiny, **speculation, max_seq_len=512)
    requests = [harness.submit(PROMPT, 360, temperature=HOT, seed=seed) for seed in range(8)]
    harness.run()
    stats = sum((request.counters.stats() for request in requests), SpeculativeStats())
    first, second = stats.per_position_acceptance
    assert first == pytest.approx(0.8, abs=0.05) and second == pytest.approx(0.72, abs=0.05)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("depth", "topk", "num_nodes"), [(1, 3, 3), (3, 3, 9), (3, 4, 20)])
def test_every_tree_and_accepted_path_is_that_of_a_slow_reference(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, depth: int, topk: int, num_nodes: int
) -> None:
    options = {"dynamic_tree_max_topK": topk, "max_total_draft_tokens": num_nodes}
    speculation = one_model(tiny_draft, head, mode, depth, **options)
    harness = Harness(tiny, **SMALL_PAGES, **speculation, disable_overlap_scheduler=True)
    plain = Harness(tiny, **SMALL_PAGES)
    requests, expected = submit_three(harness), submit_three(plain)
    plain.run()
    shape = DraftShape(depth, num_nodes, topk)
    assert_as_reference(harness, requests, list(map(output_of, expected)), shape)


@pytest.mark.slow  # as the test above, with the models of the zoo
@pytest.mark.parametrize(
    "config",
    [
        {"decoding_type": "Eagle3", "speculative_model": "zoo:llama-eagle3"},
        {
            "decoding_type": "Draft_Target",
            "speculative_model": "zoo:llama-draft",
            "draft_target_one_model": True,
        },
    ],
    ids=["head", "draft_model"],
)
def test_the_zoos_trees_and_accepted_paths_are_those_of_the_slow_reference(
    config: dict[str, Any],
) -> None:
    tokenizer, shape = load_tokenizer("zoo:llama"), DraftShape(3, 12, 4)
    texts = ("def area(self):\n    return", "import os\nimport", "for key, value in ")
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_draft_len": 3}
    ways = [{"speculative_config": config | tree, "disable_overlap_scheduler": True}, {}]
    harness, plain = (Harness("zoo:llama", **way) for way in ways)
    requests, expected = (
        [
            each.submit(tokenizer.encode(text), 24, temperature=temperature, seed=i)
            for i, (text, temperature) in enumerate(zip(texts, (None, None, 0.7), strict=True))
        ]
        for each in (harness, plain)
    )
    plain.run()
    assert_as_reference(harness, requests, list(map(output_of, expected)), shape)


def assert_as_reference(
    harness: Harness, requests: list[LlmRequest], expected: list[list[int]], shape: DraftShape
) -> None:
    """Compares every second round's tree, and how far plain decoding's text is accepted."""
    num_checked = num_accepted = 0
    for _ in range(8):
        harness.round()
        paths, lengths = {}, {}
        running = generating(harness)
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            children_of = partial(children, slow, harness, request, topk=shape.topk)
            paths[request] = slow_tree(children_of, shape.topk, shape.depth, shape.num_nodes)
            assert paths_in_slot(harness, request) == paths[request]
            lengths[request] = request.num_output_tokens
            num_checked += 1
        harness.round()
        for request, length in lengths.items():
            text = expected[requests.index(request)][length:]
            emitted = 1 + accepted_path(paths[request], text[: shape.depth])
            num_accepted += emitted - 1
            assert request.num_output_tokens == min(length + emitted, 24)
    harness.run()
    assert list(map(output_of, requests)) == expected
    assert num_checked > 8 and num_accepted > 3


@pytest.mark.thinned
@pytest.mark.parametrize("mode", ["draft_target", "eagle3", "eagle3_two_model"])
def test_a_static_tree_has_the_tokens_of_its_ranks(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    choices = [(0,), (1,), (2,), (0, 0), (0, 2), (1, 1), (0, 0, 1), (0, 2, 0), (1, 1, 0)]
    speculation = one_model(tiny_draft, head, mode, 3, eagle_choices=choices)
    harness = Harness(tiny, **SMALL_PAGES, **speculation, disable_overlap_scheduler=True)
    submit_three(harness)
    num_checked = 0
    for _ in range(8):
        harness.round()
        running = generating(harness)
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            paths: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
            for ranks in choices:
                found = children(slow, harness, request, Candidate(paths[ranks[:-1]], 1.0), 3)
                paths[ranks] = found[ranks[-1]].path
            assert paths_in_slot(harness, request) == list(paths.values())[1:]
            num_checked += 1
    harness.run()
    assert num_checked > 8


def test_a_static_tree_is_the_same_from_a_draft_model_in_its_own_engine(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    choices, found = [(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0)], []
    for mode in ("draft_target", "draft_target_two_model"):
        harness = Harness(tiny, **one_model(tiny_draft, head, mode, 3, eagle_choices=choices))
        requests = submit_three(harness, 40)
        harness.run()
        found.append([(output_of(each), each.counters.stats()) for each in requests])
    assert found[0] == found[1]
    assert all(stats.num_accepted_tokens for _, stats in found[0])


@pytest.mark.covering
@pytest.mark.parametrize("drafter", ["draft_target", "eagle3", "eagle"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_one_graph_holds_a_round_with_a_forward_of_the_drafter_for_each_step(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, drafter: str, depth: int
) -> None:
    """The first reads the accepted path, the others the three beams of the step before."""
    harness = with_graphs(
        tiny, (2,), {depth}, **one_model(tiny_draft, head, f"{drafter}_tree", depth)
    )
    runner, shape = harness.parts.runner, harness.parts.slots.shapes.of(depth)
    forward, target_rows = runner.engine.forward, list[int]()

    def watched(contexts: Any, windows: Any, *others: Any) -> torch.Tensor:
        target_rows.append(windows.token_ids.numel())
        return forward(contexts, windows, *others)

    runner.engine.forward = watched  # type: ignore[method-assign] # a spy on this one object
    rows = count_forwards(harness)
    with torch.inference_mode():
        graphs_of(harness).replay([DUMMY, DUMMY], shape, False)
    assert target_rows == [2 * shape.window]
    assert rows == [2 * shape.path] + [2 * 3] * (depth - 1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tier", [3, 4])
def test_a_chain_and_a_tree_that_are_chosen_accept_what_fixed_ones_accept(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, tier: int
) -> None:
    trees = [{"max_draft_len": 3, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}]
    choice = {"adaptive": {"candidate_steps": [0, 3], "candidate_trees": trees}}
    tree = {"dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}
    fixed = tree if tier == 4 else {"use_dynamic_tree": False, "dynamic_tree_max_topK": None}
    found = []
    for options in (choice | {"dynamic_tree_max_topK": 4}, fixed):
        harness = Harness(tiny, **one_model(tiny_draft, head, mode, 3, **options))
        if options is not fixed:
            harness.parts.tier_for = lambda *_: tier
        requests = [harness.submit([i, *PROMPT], 40, temperature=HOT, seed=i) for i in range(3)]
        harness.run()
        found.append([(output_of(each), each.counters.stats()) for each in requests])
    assert found[0] == found[1]
    assert any(stats.num_accepted_tokens for _, stats in found[0])


def test_the_controller_learns_acceptance_by_depth_and_rank_from_accepted_paths(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    """Drafts are accepted by chance: 0.5 for a first child, 0.4 of the rest for a second."""
    rates, tree = [[0.5, 0.2], [0.5, 0.2]], {"max_draft_len": 2, "dynamic_tree_max_topK": 3}
    options = {
        "synthetic_acceptance_rates": rates,
        "max_total_draft_tokens": 12,
        "adaptive": {
            "candidate_steps": [0, 2],
            "candidate_trees": [tree | {"max_total_draft_tokens": 12}],
            "window_trials": 2000.0,
        },
    }
    speculation = one_model(tiny_draft, head, "draft_target_tree", 2, **options)
    harness = Harness(tiny, **speculation, max_seq_len=500)
    harness.parts.tier_for = lambda *_: 3
    for seed in range(8):
        harness.submit(PROMPT, 220, temperature=HOT, seed=seed)
    harness.run()
    slot = harness.parts.controller.state()["slots"]["1"]
    assert slot["acceptance"] == pytest.approx([0.5, 0.5], abs=0.06)
    second, third = slot["further_children"][:2]
    assert second == pytest.approx(0.4, abs=0.06) and third < 0.04
    assert slot["tree_gain"] == pytest.approx(1.0, abs=0.12)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("depth", "topk", "num_nodes"), [(2, 4, 20), (4, 5, 6)])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_row_is_written_to_a_page_of_its_own_request(
    tiny: Path,
    tiny_draft: Path,
    head: Path,
    mode: str,
    depth: int,
    topk: int,
    num_nodes: int,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of more drafts than a path has, and beams of more keys than a window."""
    tree = {"dynamic_tree_max_topK": topk, "max_total_draft_tokens": num_nodes}
    harness = Harness(
        tiny,
        kv_cache_config={"tokens_per_block": 2, "max_tokens": 150},
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        disable_overlap_scheduler=not overlap,
        **one_model(tiny_draft, head, mode, depth, **tree),
    )
    kv, rows = harness.parts.kv, harness.parts.runner.engine.rows
    build, num_checked = rows.build, 0

    def watched(*arguments: Any) -> Any:
        nonlocal num_checked
        metadata, token_ids = build(*arguments)
        held = [kv.cache.private_pages(each.request_id) for each in harness.parts.scheduler.running]
        written = set((metadata.kv_slots // rows.page_size).tolist())
        assert written <= {page for pages in held for page in pages}
        num_checked += metadata.tree is not None
        return metadata, token_ids

    monkeypatch.setattr(rows, "build", watched)
    requests = [harness.submit([i, *PROMPT], 30, temperature=HOT, seed=i) for i in range(5)]
    harness.run()
    assert all(request.error is None for request in requests) and num_checked > 20
    assert harness.parts.scheduler.num_preemptions


@pytest.mark.parametrize("mode", ["eagle3_tree", "eagle3_static"])
def test_a_tree_that_no_round_has_room_for_is_refused(
    mode: str, tiny: Path, tiny_draft: Path, head: Path
) -> None:
    speculation = one_model(tiny_draft, head, mode, 2)
    longest = Harness(tiny, **speculation).parts.slots.shapes.longest
    window = longest.window
    Harness(tiny, max_num_tokens=window, **speculation)
    drafts = f"the draft tree {longest.name}" if longest.is_tree else "max_draft_len"
    expected = (
        f"max_num_tokens = {window - 1} is too small: one request takes {drafts} . 1 = {window} "
    )
    with pytest.raises(ValueError, match=expected):
        Harness(tiny, max_num_tokens=window - 1, **speculation)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("drafter", ["draft_target", "draft_target_two_model", "eagle3"])
def test_a_tree_may_be_as_deep_as_there_are_positions_after_the_first(
    tiny: Path, tiny_draft: Path, head: Path, drafter: str
) -> None:
    tree = TREE | {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 30}
    deepest, deeper = (one_model(tiny_draft, head, drafter, depth, **tree) for depth in (19, 20))
    plain, harness = Harness(tiny, max_seq_len=20), Harness(tiny, max_seq_len=20, **deepest)
    expected, request = (each.submit(PROMPT[:3], 17) for each in (plain, harness))
    plain.run()
    harness.run()
    assert output_of(request) == output_of(expected) and request.num_tokens == 20
    with pytest.raises(ValueError, match="max_draft_len = 20 must be less than max_seq_len = 20"):
        Harness(tiny, max_seq_len=20, **deeper)
