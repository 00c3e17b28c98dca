"""Executors whose rounds overlap, requests for them, and views of the rounds in flight."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import one_model, write_heads
from tests.executor.harness import Harness, output_of
from tests.executor.hooks import rounds_in_flight
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import rewrite
from tllm_spec.executor.request import LlmRequest

PROMPT = [3, 14, 15, 9, 26, 5, 35]
PAGE = {"kv_cache_config": {"tokens_per_block": 4}}
NAN_TOKEN = 63
NO_OVERLAP = {"disable_overlap_scheduler": True}
Make = Callable[..., Harness]


# One path each of a draft model and of a head is not slow.
MODES = [
    "plain",
    pytest.param("draft_target", marks=pytest.mark.slow),
    "draft_target_two_model",
    "eagle3",
    pytest.param("eagle3_two_model", marks=pytest.mark.slow),
    pytest.param("peagle", marks=pytest.mark.slow),
]
GOOD: dict[str, Any] = {
    "logit_bias": {NAN_TOKEN: -100.0},
    "presence_penalty": 0.5,
    "temperature": 0.9,
}


def make_of(folder: Path, tiny: Path, mode: str) -> Make:
    """Makes harnesses of a mode whose rounds overlap. Drafts never propose the token after which
    there are no numbers."""
    (folder / "draft").mkdir()
    (folder / "head").mkdir()
    draft = write_tiny_llama(folder / "draft", vocab_size=NAN_TOKEN)
    head = write_heads(folder / "head")
    first = {"d2t": torch.zeros(48, dtype=torch.int64), "t2d": torch.arange(64) < 48}
    rewrite(head, lambda tensors: tensors.update(first))

    def make(target: Path = tiny, **options: Any) -> Harness:
        harness = Harness(target, **PAGE | options, **one_model(draft, head, mode))
        assert harness.parts.max_in_flight == int("disable_overlap_scheduler" not in options)
        return harness

    return make


def num_rounds_with(harness: Harness, request: LlmRequest) -> int:
    """Rounds in flight that bring the request at least one token."""
    return sum(
        request in launched.ended_contexts or request in launched.batch.generation_requests
        for launched in rounds_in_flight(harness.executor)
    )


def assert_same_text(ours: list[LlmRequest], theirs: list[LlmRequest]) -> None:
    assert not [request.error for request in ours if request.error]
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]


def text_alone(make: Make, prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    harness = make(**NO_OVERLAP)
    request = harness.submit(prompt, max_tokens, **params)
    harness.run()
    return output_of(request)


@cache
def good_texts(make: Make) -> list[list[int]]:
    return [text_alone(make, [i, *PROMPT], 24, seed=i, **GOOD) for i in range(3)]


def submit_good(harness: Harness) -> list[LlmRequest]:
    return [harness.submit([i, *PROMPT], 24, seed=i, **GOOD) for i in range(3)]
