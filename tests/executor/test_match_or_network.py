"""Drafts of a network next to those of a match in the request's text: each request has those of one
source, and the network's cache misses nothing."""

from collections import Counter
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    LAYERS,
    SMALL_POOL,
    assert_nothing_is_missing,
    count_forwards,
    generating,
    network_of,
    one_model,
    random_lengths,
    slow_drafters,
    submit_traffic,
    with_lengths,
    write_heads,
)
from tests.executor.graph_rounds import num_replays, with_graphs
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.played_rounds import LADDER, LinearTimes
from tests.kernels.test_suffix_match import drafts_of
from tests.lossless.engines import static_choices
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    controller_for,
)
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN
from tllm_spec.kernels.dispatch import Operation
from tllm_spec.kernels.drafts.draft_sources import MATCH, NETWORK, DraftSources

OVERLAPPING = ["draft_target", "eagle3", "eagle3_two_model", "eagle3_sa_tree"]
OVERLAPPING += ["draft_target_two_model_tree", "draft_target_two_model", "pard_two_model"]
NO_OVERLAP = {"disable_overlap_scheduler": True}
MODES = ["draft_target", "eagle3", "eagle3_two_model", "eagle"]
FOR_TREES = SMALL_POOL | {"max_num_tokens": 48}
THRESHOLD = {"sa_config": {"threshold": 1}}
LEARNED: dict[str, Any] = {"sa_config": {}}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tmp_path_factory.mktemp("head"))


def sources_of(harness: Harness) -> DraftSources:
    choice = network_of(harness)._choice
    assert choice is not None
    return choice._sources


def source_of_drafts(harness: Harness, request: LlmRequest, slow: Any) -> int:
    """Checks what the request's slot has for the next round."""
    match, length = drafts_of(request.tokens, 3, 64)
    expected = match
    if not length:
        expected = slow.drafts(3, request.rules.temperature or None, request.seed)
    slots = harness.parts.slots
    assert slots.window[request.slot].tolist() == [request.tokens[-1], *expected]
    assert slots.num_drafts[request.slot] == min(3, request.draft_limit)
    return MATCH if length else NETWORK


@pytest.mark.thinned(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["undisturbed", "small_pool"])
def test_a_long_match_takes_the_place_of_the_networks_drafts(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, options: dict[str, Any]
) -> None:
    """Also after prefix hits, prompts in chunks and preemptions."""
    speculation = one_model(tiny_draft, head, mode, **THRESHOLD)
    harness = Harness(tiny, **options, **NO_OVERLAP, **speculation)
    plain = Harness(tiny)
    requests, expected = (submit_traffic(each, Random(4), 20) for each in (harness, plain))
    plain.run()
    seen = []
    while harness.round():
        running = [request for request in generating(harness) if request.num_output_tokens]
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            seen.append(source_of_drafts(harness, request, slow))
        assert_nothing_is_missing(harness, *running)
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert seen.count(MATCH) > 15 and seen.count(NETWORK) > 15
    assert bool(harness.parts.scheduler.num_preemptions) == bool(options)
    assert all_pages_are_back(harness.executor)


def branch_of(harness: Harness, request: LlmRequest) -> int:
    """Checks that the match is a branch of the tree that the request's slot has for the next
    round. Returns 1 if the network has not drafted it."""
    match, length = drafts_of(request.tokens, 3, 64)
    slots, sources = harness.parts.slots, sources_of(harness)
    if not length:
        assert sources.choices[request.slot].tolist() == [0, NETWORK]
        return 0
    tokens, slot = slots.window[request.slot].tolist(), torch.tensor([request.slot])
    (parents,) = slots.parents(slot, len(tokens)).tolist()
    node = 0
    for token in match[: request.draft_limit]:
        (node,) = (n for n, own in enumerate(parents) if own == node and tokens[n] == token)
    return int(sources.choices[request.slot, 1])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", ["sa_tree", "two_model_sa_tree", "static"])
@pytest.mark.parametrize("options", [{}, FOR_TREES], ids=["undisturbed", "small_pool"])
def test_a_long_match_is_a_branch_of_the_networks_tree(
    tiny: Path, tiny_draft: Path, head: Path, kind: str, options: dict[str, Any]
) -> None:
    speculation = one_model(tiny_draft, head, f"eagle3_{kind}", **THRESHOLD)
    if kind == "static":
        speculation["speculative_config"]["eagle_choices"] = static_choices(3)
    harness = Harness(tiny, **options, **NO_OVERLAP, **speculation)
    plain = Harness(tiny)
    requests, expected = (submit_traffic(each, Random(4), 20) for each in (harness, plain))
    plain.run()
    num_branches = 0
    while harness.round():
        for request in generating(harness):
            if request.num_output_tokens:
                num_branches += branch_of(harness, request)
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert num_branches > 15
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("mode", OVERLAPPING)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_overlap_and_graphs_leave_texts_choices_and_figures_as_they_are(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, graphs: bool, mode: str
) -> None:
    options = {"max_batch_size": 8, **one_model(tiny_draft, head, mode, **LEARNED)}
    harness = with_graphs(tiny, (1, 4, 8), {0, 3}, **options) if graphs else None
    harness, in_turn = harness or Harness(tiny, **options), Harness(tiny, **options, **NO_OVERLAP)
    plain = Harness(tiny, max_batch_size=8)
    ours, theirs, expected = (
        submit_traffic(each, Random(5), 14) for each in (harness, in_turn, plain)
    )
    for each in (harness, in_turn, plain):
        each.run()
    assert list(map(output_of, ours)) == list(map(output_of, expected))
    assert list(map(output_of, theirs)) == list(map(output_of, expected))
    assert not graphs or len(num_replays(harness)) > 2
    figures = in_turn.executor.state()["draft_sources"]
    assert figures["network"]["rounds"] > 10
    rounds, accepted = (
        sum(figures[source][name] for source in ("network", "match"))
        for name in ("rounds", "accepted_tokens")
    )
    stats = [request.counters.stats() for request in theirs]
    assert rounds == sum(sum(request.counters.by_drafted[1:]) for request in theirs)
    # The device counts what comes after a request's end, too, and of a network's tree one path.
    counted = sum(each.num_accepted_tokens for each in stats)
    assert accepted >= counted * (not mode.endswith("_tree"))
    assert accepted > 5


def test_what_repeats_itself_is_learned_to_be_copied(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    """The head is hardly ever right, and greedy texts of the tiny target end in a loop."""
    harness = Harness(tiny, **one_model(tiny_draft, head, "eagle3", **LEARNED))
    request = harness.submit([1, 2, 3], max_tokens=120)
    harness.run()
    figures = harness.executor.state()["draft_sources"]
    assert figures["match"]["accepted_tokens"] > 40 > figures["network"]["accepted_tokens"]
    assert request.counters.stats().acceptance_length > 1.5


def test_a_changing_draft_length_changes_no_text(tiny: Path, tiny_draft: Path, head: Path) -> None:
    """With lengths of 0 for as long as the network's backlog lasts, and longer."""
    harness = Harness(tiny, **one_model(tiny_draft, head, "eagle3", **LEARNED))
    plain = Harness(tiny)
    with_lengths(harness, random_lengths(Random(2)))
    requests, expected = (
        [each.submit([i, i + 1, i], 60, temperature=HOT if i % 2 else None) for i in range(4)]
        for each in (harness, plain)
    )
    harness.run()
    plain.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))


def copies_of(harness: Harness, request: LlmRequest) -> int:
    """Checks that the request's slot has the match's drafts, and none without a match. Returns how
    many there are."""
    match, length = drafts_of(request.tokens, 3, 64)
    slots, number = harness.parts.slots, min(len(match) if length else 0, request.draft_limit)
    assert slots.num_drafts[request.slot] == number
    assert slots.window[request.slot, 1 : 1 + number].tolist() == match[:number]
    return number


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", MODES)
def test_copied_drafts_take_one_forward_of_the_network_which_misses_nothing(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    """The network's drafts in rounds between them are those of a network that made all others."""
    own = {"adaptive": {"candidate_steps": [0, 3]}} | THRESHOLD
    harness = Harness(tiny, **NO_OVERLAP, **one_model(tiny_draft, head, mode, **own))
    plain, copied = Harness(tiny), harness.parts.slots.shapes.copied_tier
    requests, expected = (submit_traffic(each, Random(4), 20) for each in (harness, plain))
    plain.run()
    tiers, asked, seen = cycle([copied, copied, 3]), [0], Counter[int | None]()
    harness.parts.tier_for = lambda *_: asked.append(next(tiers)) or asked[-1]
    rows = count_forwards(harness)
    while harness.round():
        running = [request for request in generating(harness) if request.num_output_tokens]
        if asked[-1] == copied and running:
            assert len(rows) == 1
            seen[copied] += sum(copies_of(harness, request) for request in running)
        elif asked[-1]:
            for request, slow in zip(running, slow_drafters(harness, running), strict=True):
                seen[source_of_drafts(harness, request, slow)] += 1
        assert_nothing_is_missing(harness, *running)
        rows.clear()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert min(seen[copied], seen[NETWORK], seen[MATCH]) > 5
    assert all_pages_are_back(harness.executor)


def test_where_the_text_repeats_itself_copied_drafts_take_the_place_of_no_drafts(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    """The head is hardly ever right and takes as long as the target. By counts of rounds."""
    adaptive = {"candidate_steps": [0, 3]}
    options = one_model(tiny_draft, head, "eagle3", adaptive=adaptive, **LEARNED)
    harness = Harness(tiny, **options)
    times = MeasuredRoundTimes({1: {0: 1.0, 3: 4.0, 4: 1.1}})
    spec = LlmArgs.from_kwargs(tiny, **options).speculative_config
    controller = controller_for(spec, round_times=times)
    harness.parts.controller, harness.parts.tier_for = controller, controller.tier_for
    request = harness.submit([1, 2, 3], max_tokens=120)
    harness.run()
    assert controller.state()["slots"]["1"]["steps"]["1"] == "3 copied"
    assert request.counters.stats().acceptance_length > 1.5


def test_copied_drafts_that_shorter_windows_cut_say_nothing_of_them(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    options = one_model(tiny_draft, head, "eagle3", adaptive={"candidate_steps": [0, 1, 3]})
    options["speculative_config"] |= LEARNED
    harness, known = Harness(tiny, **NO_OVERLAP, **options), list[tuple[float, float]]()
    controller, copied = harness.parts.controller, harness.parts.slots.shapes.copied_tier
    harness.parts.hindsight, observe = None, controller.observe

    def listen(observed: ObservedRound) -> bool:
        before = controller.state()["slots"]["1"]["copied"]
        changed = observe(observed)
        if observed.verified_tier == copied:
            after = controller.state()["slots"]["1"]["copied"]
            known.append((before, after))
        return changed

    controller.observe = listen  # type: ignore[method-assign] # the test listens
    tiers = cycle([copied, 1, 1])
    harness.parts.tier_for = lambda *_: next(tiers)
    harness.submit([1, 2, 3], max_tokens=90)
    harness.run()
    assert len(known) > 20
    assert all(before == after for before, after in known)


COPIED = 4  # the tier after chains of up to 3


class CopiedTimes(LinearTimes):
    """Copied drafts take 0.5 ms, each of the network's 3 ms."""

    def round_time(self, batch_size: int, tier: int) -> float:
        return 10.5e-3 if tier == COPIED else super().round_time(batch_size, tier)


def play_copied(controls: AdaptiveController, rounds: int, copied: int, network: int) -> list[int]:
    """So many copied drafts are accepted, and so many of the network's."""
    asked = []
    for _ in range(rounds):
        asked.append(tier := controls.tier_for(1))
        accepted = [copied if tier == COPIED else min(tier, network)] if tier else []
        controls.observe(ObservedRound(1, accepted, tier))
    return asked


def test_copied_drafts_are_compared_by_their_own_acceptance_and_time() -> None:
    """Whatever is the best of the present traffic, probes find it when the traffic changes."""
    controls = AdaptiveController.from_config(
        {"candidate_steps": list(LADDER)},
        round_times=CopiedTimes(3.0),
        shapes=DraftShapes.chains(3, copies=True),
    )
    assert controls.state()["draft_lens"] == [*LADDER, "3 copied"]
    for copied, network, best in ((0, 0, 0), (1, 0, COPIED), (0, 0, 0), (1, 3, 3), (2, 0, COPIED)):
        play_copied(controls, 6000, copied, network)
        asked = play_copied(controls, 1000, copied, network)
        assert asked.count(best) > 900, (copied, network, Counter(asked))


def test_drafts_of_a_slots_last_request_are_not_counted_for_the_next(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    harness = Harness(tiny, max_batch_size=1, **one_model(tiny_draft, head, "eagle3", **LEARNED))
    first, sources = harness.submit([7, 8, 7, 8], max_tokens=40), sources_of(harness)
    harness.run_until(first, RequestState.GENERATION)
    harness.round()
    harness.queue.cancel(first.request_id)
    with_lengths(harness, 0)
    second = harness.submit([9, 8, 9], max_tokens=9)
    harness.run_until(second, RequestState.GENERATION)
    counts = sources.counts.clone()
    harness.run()
    assert counts.sum() > 0 and (sources.counts == counts).all()


def test_the_memory_plan_counts_the_texts(tiny: Path, tiny_draft: Path, head: Path) -> None:
    plans = [
        BuildPlan(LlmArgs.from_kwargs(tiny, max_batch_size=8, cuda_graph_config=None, **options))
        for options in (
            one_model(tiny_draft, head, "eagle3", **own) for own in (LEARNED, {"sa_config": None})
        )
    ]
    more = reserved_bytes(plans[0], None, ()) - reserved_bytes(plans[1], None, ())
    assert more == 9 * plans[0].max_len * 4


def operations_of(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Names and number of the operations with kernels in twice `BACKLOG_LEN` rounds without
    drafts."""
    harness.submit([3, 14, 15, 9], max_tokens=100, ignore_eos=True)
    harness.parts.tier_for = lambda batch_size: 0
    for _ in range(BACKLOG_LEN):
        harness.executor.step()
    found, run = Counter[str](), Operation.__call__

    def counted(operation: Operation[..., Any], *args: Any, **kwargs: Any) -> Any:
        found[operation.__name__] += 1
        return run(operation, *args, **kwargs)

    monkeypatch.setattr(Operation, "__call__", counted)
    for _ in range(2 * BACKLOG_LEN):
        harness.executor.step()
    monkeypatch.undo()
    return found


def test_a_round_without_drafts_does_what_plain_decoding_does_and_keeps_what_a_head_reads_later(
    tiny: Path, tiny_draft: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trees and matches in the text, of which nothing but these few copies is left."""
    options = one_model(tiny_draft, head, "eagle3_sa_tree", adaptive={"candidate_steps": [0, 3]})
    sides = (Harness(tiny, max_batch_size=1, **each) for each in ({}, options))
    plain, own = (operations_of(each, monkeypatch) for each in sides)
    kept = {"copy_rows": len(LAYERS), "store_in_rings": 1, "append_tokens": 1}
    rounds = 2 * BACKLOG_LEN
    more = own - plain - Counter({name: number * rounds for name, number in kept.items()})
    assert not plain - own
    assert more.total() < rounds, more  # the head's forward of each `BACKLOG_LEN` rounds
