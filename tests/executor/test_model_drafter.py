from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import PREEMPTS
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.model_drafter import DraftKVManager

PROMPT = [3, 14, 15, 9, 26, 5, 35]


def draft_kv(harness: Harness) -> DraftKVManager:
    manager = harness.parts.resources[0]
    assert isinstance(manager, DraftKVManager)
    return manager


def keys_and_values(kv: KVCacheManager, request: LlmRequest, length: int) -> torch.Tensor:
    """`[layers, 2, length, kv_heads, head_dim]` of the request's first tokens."""
    pages = kv.cache.pages(request.request_id)
    return kv.groups[0].pools[0].data[:, :, pages].flatten(2, 3)[:, :, :length]


def fresh_keys_and_values(model: Path, tokens: list[int]) -> torch.Tensor:
    """The same, from one prefill of the tokens in an engine of its own."""
    harness = Harness(model, max_batch_size=1)
    request = harness.submit(tokens, max_tokens=2)
    harness.run_until(request, RequestState.GENERATION)
    return keys_and_values(harness.parts.kv, request, len(tokens))


SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunked_prefill": {"enable_chunked_prefill": True, "max_num_tokens": 16},
    "preemption": PREEMPTS,
}


DRAFTS: dict[str, dict[str, Any]] = {
    "torch": {},
    "onnxruntime": {"draft_backend": "onnxruntime"},
    "matches": {"sa_config": {"threshold": 1}},
}
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_draft_cache_always_equals_a_prefill_of_the_same_tokens(
    tiny: Path, tiny_draft: Path, situation: str, drafts: str
) -> None:
    options = {"max_batch_size": 3, "kv_cache_config": {"tokens_per_block": 4}} | SITUATIONS[
        situation
    ]
    harness = Harness(tiny, **options, **draft_target(tiny_draft, 3, **DRAFTS[drafts]))
    kv, random = draft_kv(harness), Random(1)
    shared = [
        random.randrange(64) for _ in range(17)
    ]  # a whole number of pages and one token: partial reuse
    requests = [
        harness.submit(shared + [i] * i, max_tokens=25, temperature=0.8 if i % 2 else None)
        for i in range(8)
    ]
    num_checked = 0
    for number in range(10_000):
        if not harness.round():
            break
        for request in harness.parts.scheduler.running:
            num_read = request.kv_len + 1 - request.draft_backlog
            if number % 5 == 0 and num_read and kv.holds(request):
                own = keys_and_values(kv, request, num_read)
                fresh = fresh_keys_and_values(tiny_draft, request.tokens[:num_read])
                assert (own - fresh).abs().max() < 1e-4
                num_checked += 1
    assert num_checked > 20
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    assert all(request.num_output_tokens == 25 for request in requests)
    assert all_pages_are_back(harness.executor)


def test_argmax_drafts_agree_less_often_with_a_sampled_text_than_coupled_ones(
    tiny: Path, tiny_draft: Path
) -> None:
    rates = {}
    for how in ("coupled", "greedy"):
        own = draft_target(tiny_draft, 3, draft_sampling=how)
        harness = Harness(tiny, max_batch_size=20, **own)
        requests = [harness.submit([i], max_tokens=40, temperature=1.0, seed=i) for i in range(20)]
        harness.run()
        rates[how] = sum(request.counters.stats().acceptance_length for request in requests) / 20
    assert rates["coupled"] > rates["greedy"] + 0.1


def test_requests_without_speculation_take_no_draft_pages(tiny: Path) -> None:
    harness = Harness(tiny, **draft_target(tiny))
    quiet = harness.submit(PROMPT, max_tokens=12, draft_limit=0)
    modest = harness.submit(PROMPT, max_tokens=12, draft_limit=1)
    harness.run_until(modest, RequestState.GENERATION)
    harness.round()
    assert not draft_kv(harness).holds(quiet) and draft_kv(harness).holds(modest)
    harness.run()
    assert (
        quiet.counters.stats().num_drafted_tokens == 0
        and quiet.counters.stats().acceptance_length == 1
    )
    assert modest.counters.stats().per_position_drafted == (6, 0, 0, 0)
    assert output_of(quiet) == output_of(modest)


@pytest.mark.parametrize("vocab_size", [60, 70])
def test_a_draft_model_may_have_fewer_or_more_rows_than_the_target(
    tiny: Path, tmp_path: Path, vocab_size: int
) -> None:
    draft = write_tiny_llama(tmp_path, vocab_size=vocab_size)
    for options in ({}, {"use_rejection_sampling": True}):
        harness = Harness(tiny, **draft_target(draft, 3, **options))
        requests = [
            harness.submit([i, 63], max_tokens=30, temperature=t)
            for i, t in enumerate((None, 1.0) * 4)
        ]
        harness.run()
        assert all(request.finish_reason == "length" for request in requests)
        assert all(0 <= token < 64 for request in requests for token in request.tokens)


def test_catching_up_never_takes_more_rows_than_the_budget(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(
        tiny,
        max_num_tokens=16,
        enable_chunked_prefill=True,
        **draft_target(tiny, 3, max_concurrency=2),
    )
    sizes, forward = list[int](), DraftNet.forward

    def record(
        layers: DraftNet, chunks: list[ContextChunk], *others: Any, **options: Any
    ) -> torch.Tensor:
        sizes.append(sum(len(chunk.tokens) for chunk in chunks))
        return forward(layers, chunks, *others, **options)

    monkeypatch.setattr(DraftNet, "forward", record)
    requests = [harness.submit([i] * 3, max_tokens=60 if i < 2 else 40) for i in range(3)]
    harness.run()
    # Three at a time do not draft; when the third one ends, the others have some 40 tokens each to
    # catch up on.
    assert max(sizes) == 16 and sum(sizes) > 2 * 40
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.parametrize("drafts", ["torch", "matches", "trees"])
def test_the_longest_request_has_no_more_draft_pages_than_the_block_table(
    tiny: Path, tiny_draft: Path, drafts: str
) -> None:
    cache = {"tokens_per_block": 1, "enable_block_reuse": False}
    options = draft_target(tiny_draft, 3, **(DRAFTS | {"trees": TREE})[drafts])
    harness = Harness(tiny, max_seq_len=24, kv_cache_config=cache, **options)
    kv, most = draft_kv(harness), 0
    request = harness.submit(PROMPT, max_tokens=17)
    while harness.round():
        if kv.holds(request):
            most = max(most, len(kv.cache.pages(request.request_id)))
    assert request.finish_reason == "length"
    assert 24 < most <= kv.groups[0].table.device_rows.shape[1]
