"""The drafter inside the target's forward: its cache and its drafts are those of a slow loop over
the true tokens."""

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    PREEMPTS,
    TREE,
    assert_nothing_is_missing,
    count_forwards,
    generating,
    network_of,
    one_model,
    slow_drafters,
)
from tests.executor.harness import (
    Harness,
    all_pages_are_back,
    draft_target,
    output_of,
    user_provided,
)
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.request import LlmRequest, RequestState

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
SMALL_PAGES = {"kv_cache_config": {"tokens_per_block": 4}}
# Options of the executor, and of the drafting.
SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "undisturbed": ({}, {}),
    "read_at_once": ({"disable_overlap_scheduler": True}, {}),
    "chunked_prefill": ({"enable_chunked_prefill": True, "max_num_tokens": 14}, {}),
    "pauses": ({}, {"max_concurrency": 2}),
    "shared_rows": ({}, {"verify_budget": 2.5}),
    "preemption": (PREEMPTS, {}),
}
AT_ONCE = ["peagle", "peagle_two_model", "pard"]
CHAINS = ["draft_target", "eagle3", "eagle3_two_model", "eagle", *AT_ONCE]
MODES = [*CHAINS, *(f"{mode}_tree" for mode in CHAINS)]


@pytest.mark.thinned(31)
@pytest.mark.parametrize(
    ("mode", "situation"),
    [
        (mode, situation)
        for situation, mode in product(SITUATIONS, MODES)
        if mode in CHAINS or situation != "shared_rows"
    ],
)
def test_the_draft_cache_always_equals_a_prefill_of_the_true_tokens(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, situation: str
) -> None:
    options, drafting = SITUATIONS[situation]
    speculation = one_model(tiny_draft, head, mode, **drafting)
    harness = Harness(tiny, **SMALL_PAGES | {"max_batch_size": 3} | options, **speculation)
    random, num_checked = Random(1), 0
    shared = [random.randrange(64) for _ in range(17)]  # whole pages and one token: a partial hit
    requests = [
        harness.submit(shared + [i] * i, max_tokens=24, temperature=HOT if i % 3 else None)
        for i in range(7)
    ]
    for number in range(10_000):
        if not harness.round():
            break
        if number % 2 == 0:
            begun = [each for each in generating(harness) if each.num_output_tokens]
            assert_nothing_is_missing(harness, *begun)
            num_checked += len(begun)
    drafted, accepted = (
        [
            sum(counts)
            for counts in zip(*(getattr(each.counters, name) for each in requests), strict=True)
        ]
        for name in ("by_drafted", "by_accepted")
    )
    assert num_checked > 20 and accepted[0] >= 10
    if situation == "pauses":
        assert drafted[0] > 20 and drafted[3] >= 10
    else:
        assert sum(accepted[1:]) > 5
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    assert any(request.cached_tokens >= 16 for request in requests)
    assert all(request.num_output_tokens == 24 for request in requests)
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("mode", CHAINS)
@pytest.mark.parametrize(
    ("draft_len", "sampling"), [(1, "coupled"), (4, "coupled"), (1, "greedy"), (4, "greedy")]
)
def test_drafts_are_those_of_a_slow_loop_up_to_each_requests_limit(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, draft_len: int, sampling: str
) -> None:
    speculation = one_model(tiny_draft, head, mode, draft_len, draft_sampling=sampling)
    harness = Harness(tiny, **SMALL_PAGES, **speculation, disable_overlap_scheduler=True)
    slots = harness.parts.slots
    temperatures, limits = [None, HOT, 0.7, HOT], [None, 0, 2, None]
    requests: list[LlmRequest] = []
    for number in range(12):
        if number % 2 == 0 and len(requests) < 4:  # joins with running requests
            i = len(requests)
            requests.append(
                harness.submit(
                    [i, *PROMPT], 20, temperature=temperatures[i], draft_limit=limits[i], seed=i
                )
            )
        harness.round()
        running = generating(harness)
        for request, slow in zip(running, slow_drafters(harness, running), strict=True):
            temperature = request.rules.temperature if sampling == "coupled" else 0.0
            expected = slow.drafts(draft_len, temperature or None, request.seed)
            assert slots.window[request.slot].tolist() == [request.tokens[-1], *expected]
            assert slots.num_drafts[request.slot] == min(draft_len, request.draft_limit)
    harness.run()
    drafted = [request.counters.stats().per_position_drafted for request in requests]
    assert not any(drafted[1]) and not any(drafted[2][2:])
    assert all(drafted[0]) and all(drafted[3]) and all(drafted[2][:2])


@pytest.mark.thinned(7)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [[], [60, 61]])
def test_a_prefix_hit_at_any_offset_in_a_page_leaves_no_hole_in_the_draft_cache(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, other: list[int]
) -> None:
    harness = Harness(tiny, **SMALL_PAGES, **one_model(tiny_draft, head, mode))
    first = harness.submit(PROMPT, max_tokens=20, temperature=HOT)
    harness.run()
    for length in range(9, 18):
        request = harness.submit(first.tokens[:length] + other, max_tokens=12, temperature=HOT)
        harness.run_until(request, RequestState.GENERATION)
        while not request.is_finished:
            if request.num_output_tokens:
                assert_nothing_is_missing(harness, request)
            harness.round()
        # Of what is equal, EAGLE cannot use the last entry: it was made from another next token.
        assert request.cached_tokens >= min(length, len(request.tokens) - 12 - 1) - 1


@pytest.mark.parametrize(("mode", "num_read"), [("peagle", 8), ("peagle_tree", 8), ("pard", 9)])
def test_all_drafts_come_from_one_forward_of_masks_after_the_emitted_tokens(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, num_read: int
) -> None:
    harness = Harness(tiny, **one_model(tiny_draft, head, mode))
    rows = count_forwards(harness)
    harness.submit(PROMPT, max_tokens=20)
    harness.round()
    assert rows == [num_read, 2]  # next to a prompt masks have a forward of their own
    for _ in range(3):
        del rows[:]
        harness.round()
        assert rows == [6]  # four that may have been emitted, and two masks


@pytest.mark.covering
@pytest.mark.parametrize("temperature", [None, 0.9])
@pytest.mark.parametrize("draft_len", [1, 2, 5])
@pytest.mark.parametrize("one_model", [True, False])
def test_a_model_that_drafts_for_itself_is_always_accepted(
    tiny: Path, one_model: bool, draft_len: int, temperature: float | None
) -> None:
    own = draft_target(tiny, draft_len, draft_target_one_model=one_model)
    harness = Harness(tiny, **(SMALL_PAGES if one_model else {}), **own)
    request = harness.submit(PROMPT, max_tokens=1 + 6 * (draft_len + 1), temperature=temperature)
    harness.run()
    stats = request.counters.stats()
    assert stats.rounds == 6 and stats.acceptance_length == draft_len + 1


def test_a_request_that_joins_others_without_drafts_has_drafts_at_once(tiny: Path) -> None:
    harness = Harness(tiny, **draft_target(tiny, 3, draft_target_one_model=True))
    company = harness.submit(PROMPT[::-1], max_tokens=40, draft_limit=0)
    harness.run_until(company, RequestState.GENERATION)
    request = harness.submit(PROMPT, max_tokens=1 + 4 * 6)
    harness.run()
    assert request.counters.by_drafted == [0, 0, 0, 6] == request.counters.by_accepted
    assert company.counters.by_accepted == [39, 0, 0, 0]


@pytest.mark.parametrize("mode", CHAINS)
def test_for_rejection_sampling_the_worker_keeps_the_distributions_of_its_drafts(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    speculation = one_model(tiny_draft, head, mode, use_rejection_sampling=True)
    harness = Harness(tiny, **speculation, disable_overlap_scheduler=True)
    requests = [harness.submit([i, *PROMPT], 30, temperature=t) for i, t in enumerate((None, 0.8))]
    for _ in range(6):
        harness.round()
        slots = torch.tensor([request.slot for request in requests])
        probs = network_of(harness).draft_probs(harness.parts.sampler.groups.get(requests, 4))
        assert probs is not None
        drafts = harness.parts.slots.window[slots, 1:]
        assert probs.shape == (2, 3, 64) and torch.allclose(probs.sum(-1), torch.ones(2, 3))
        assert (probs.gather(2, drafts.unsqueeze(2)) > 0).all()
        assert (probs[0].max(-1).values == 1).all() and (probs[1].max(-1).values < 1).all()
        slow = slow_drafters(harness, requests)
        for request, row, scores in zip(requests, probs, slow, strict=True):
            first = scores._logits / (request.rules.temperature or 1e-6)
            ids = torch.arange(64) if scores._map is None else scores._map
            assert torch.allclose(row[0, ids], first.softmax(-1), atol=1e-4)


TWO_MODEL = {"draft_target_one_model": False}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_sampling": "greedy"},
        {"use_rejection_sampling": True},
        TREE,
        TREE | {"use_rejection_sampling": True},
        {"eagle_choices": [[0], [1], [0, 0], [1, 1], [0, 0, 0]]},
        TWO_MODEL,
        TWO_MODEL | {"draft_sampling": "greedy"},
        TWO_MODEL | {"use_rejection_sampling": True},
    ],
)
def test_a_draft_model_that_gives_nan_changes_no_text(
    tiny: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    draft = write_tiny_llama(tmp_path, nan_token=5)
    speculation = draft_target(draft, 3, **{"draft_target_one_model": True} | options)
    plain, harness = Harness(tiny), Harness(tiny, **SMALL_PAGES, **speculation)
    pairs = [
        [each.submit([5, i], 20, temperature=t, seed=i) for each in (plain, harness)]
        for i, t in enumerate((None, 1.0) * 3)
    ]
    plain.run()
    harness.run()
    assert all(len(output_of(found)) == 20 for _, found in pairs) and all_pages_are_back(
        harness.executor
    )
    if "use_rejection_sampling" not in options:
        assert all(output_of(found) == output_of(expected) for expected, found in pairs)


@pytest.mark.parametrize("drafts", [[63], [1, 63]])
def test_a_draft_whose_embedding_is_nan_changes_no_token_before_it(
    tmp_path: Path, drafts: list[int]
) -> None:
    target = write_tiny_llama(tmp_path, nan_token=63)
    texts = []
    for options in ({}, user_provided(lambda request: drafts)):
        harness = Harness(target, **options)
        request = harness.submit(PROMPT, max_tokens=9, logit_bias={63: -100.0})
        harness.run()
        texts.append((request.error, output_of(request)))
    assert texts[0] == texts[1]
