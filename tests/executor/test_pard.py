"""Drafts of a PARD model through the engine, on both paths."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.executor.draft_caches import (
    HOT,
    MASK,
    SMALL_POOL,
    TOLERANCE,
    generating,
    one_model,
    submit_traffic,
)
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.speculative.drafting.drafting_steps import DraftSteps
from tllm_spec.executor.speculative.drafting.loaded_draft import check_draft
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.models.registry import model_config

MODES = ["pard", "pard_two_model"]
DRAFT_LEN = 4


def drafted_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits `[K, N, V]` of every round's drafts."""
    found: list[torch.Tensor] = []
    draft = DraftSteps.draft

    def spy(
        self: DraftSteps, group: Any, shape: Any, kv_lens: Any, states: torch.Tensor, bound: int
    ) -> Any:
        logits = self._net.compute_logits(states)
        found.append(logits.view(-1, len(group.slots), logits.shape[1]))
        return draft(self, group, shape, kv_lens, states, bound)

    monkeypatch.setattr(DraftSteps, "draft", spy)
    return found


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits `[K, V]` of the last token and of the mask tokens after it, without a cache."""
    ids = torch.tensor([[*tokens, *[MASK] * (DRAFT_LEN - 1)]])
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, -DRAFT_LEN:]
    return logits


@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_those_of_one_whole_forward_with_mask_tokens_at_the_end(
    tiny: Path, tiny_draft: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drafted_logits(monkeypatch)
    speculation = one_model(tiny_draft, tiny_draft, mode, DRAFT_LEN)
    harness = Harness(tiny, **speculation, disable_overlap_scheduler=True)
    reference = LlamaForCausalLM.from_pretrained(tiny_draft, dtype=torch.float32)
    requests = [
        harness.submit([i, 3, 14, 15, 9], 30, temperature=HOT if i % 2 else None) for i in range(4)
    ]
    while len(generating(harness)) < 4:
        harness.round()
    num_checked = 0
    while generating(harness) == requests and num_checked < 24:
        before = [request.tokens[:] for request in requests]
        del found[:]
        harness.round()
        if generating(harness) != requests:
            break
        # A model of its own drafts before the target's forward, the other after it.
        texts = before if mode == "pard_two_model" else [each.tokens for each in requests]
        own = found[-1]
        for place, tokens in enumerate(texts):
            expected = reference_logits(reference, tokens)
            assert (own[:, place] - expected).abs().max() < TOLERANCE
            num_checked += 1
    assert num_checked >= 12 and sum(each.counters.by_accepted[1] for each in requests) > 0


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", [*MODES, "pard_tree", "pard_two_model_tree"])
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_plain_decoding_with_preemption_and_prefix_hits(
    tiny: Path, tiny_draft: Path, mode: str, overlap: bool
) -> None:
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 112}}
    texts = []
    for each in ("plain", mode):
        speculation = one_model(tiny_draft, tiny_draft, each)
        options = SMALL_POOL | pool | {"max_num_tokens": 60, **speculation}
        harness = Harness(tiny, **options, disable_overlap_scheduler=not overlap)
        requests = submit_traffic(harness, Random(5), 24)
        harness.run()
        texts.append([output_of(request) for request in requests])
        assert all_pages_are_back(harness.executor)
    assert texts[0] == texts[1]
    assert harness.parts.scheduler.num_preemptions


def test_a_model_without_a_mask_token_is_refused_by_option(tiny: Path, tiny_draft: Path) -> None:
    config = model_config(tiny)

    def check(**options: Any) -> None:
        spec = {"decoding_type": "PARD", "max_draft_len": 3, "speculative_model": str(tiny_draft)}
        args = LlmArgs(model=str(tiny), speculative_config=spec | options)
        check_draft(draft_plan_of(args.speculative_config), None, config)

    with pytest.raises(ValueError, match=r"mask_token_id is needed, .* names no mask token"):
        check()
    with pytest.raises(ValueError, match=r"mask_token_id = 64 is not a token of .* has 64"):
        check(mask_token_id=64)
    check(mask_token_id=63)
