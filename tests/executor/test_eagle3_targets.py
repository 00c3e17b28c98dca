"""EAGLE-3 heads for targets with another attention than the head's: latents, chunks, windows and
scaled embeddings, sinks, experts. In every situation the drafts are those of a slow loop over the
true tokens."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.executor.draft_caches import (
    assert_all_is_there,
    eagle3,
    generating,
    slow_drafters,
)
from tests.executor.harness import Harness, all_pages_are_back
from tests.executor.test_mtp import PAGES, SITUATIONS
from tests.lossless.small_models import by_default
from tests.models.deepseek import save_deepseek
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import random_tokens, save_checkpoint
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tests.models.tiny_eagle3 import write_tiny_eagle3

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# A request has 34 tokens at most: three chunks, and two changes of the temperature.
CHUNKS = {"attention_chunk_size": 14, "floor_scale": 12, "no_rope_layer_interval": 2}
SAVERS: dict[str, Callable[[Path], Any]] = {
    "latents": lambda folder: save_deepseek(folder, "DeepseekV3"),
    "chunks": lambda folder: save_llama4(folder, num_hidden_layers=3, **CHUNKS),
    "windows": save_gemma3,
    "sinks": save_gpt_oss,
    "experts": lambda folder: save_checkpoint(folder, "Qwen3Moe", num_hidden_layers=3, **EXPERTS),
}
DRAFT_LEN = 3


@pytest.fixture(scope="module")
def write_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}

    @cache
    def write(latent: bool) -> Path:
        folder = tmp_path_factory.mktemp("head")
        return write_tiny_eagle3(folder, num_captured=2, latent=latent, **sizes)

    return write


@pytest.mark.thinned(6)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("target", SAVERS)
@pytest.mark.parametrize("one_model", [True, False])
def test_drafts_are_those_of_a_slow_loop(
    one_model: bool,
    target: str,
    situation: str,
    write_head: Callable[[bool], Path],
    tmp_path: Path,
) -> None:
    check_drafts(one_model, target, situation, write_head(False), tmp_path)


@pytest.mark.parametrize(
    ("one_model", "target", "situation"),
    by_default(
        [(True, "latents", "preemption"), (False, "experts", "chunked_prefill")],
        *((True, False), ("latents", "experts", "windows"), SITUATIONS),
    ),
)
def test_drafts_of_a_head_with_latents_are_those_of_a_slow_loop(
    one_model: bool,
    target: str,
    situation: str,
    write_head: Callable[[bool], Path],
    tmp_path: Path,
) -> None:
    check_drafts(one_model, target, situation, write_head(True), tmp_path)


def check_drafts(one_model: bool, target: str, situation: str, head: Path, tmp_path: Path) -> None:
    SAVERS[target](tmp_path)
    options = {"max_batch_size": 3, "max_seq_len": 64, "kv_cache_config": PAGES}
    options |= {"disable_overlap_scheduler": True} | SITUATIONS[situation]
    own = eagle3(head, DRAFT_LEN, eagle3_one_model=one_model, eagle3_layers_to_capture=[0, 2])
    harness = Harness(tmp_path, **options, **own)
    shared, num_checked = random_tokens(19), 0  # a prefix ends within a page
    requests = [harness.submit(shared + [i] * i, max_tokens=12) for i in range(6)]
    while harness.round():
        running = generating(harness)
        references = slow_drafters(harness, running)
        assert_all_is_there(harness, references, running)
        for request, slow in zip(running, references, strict=True):
            window = harness.parts.slots.window[request.slot].tolist()
            assert window == [request.tokens[-1], *slow.drafts(DRAFT_LEN, None, 0)]
            num_checked += 1
    assert num_checked > 20 and all(request.num_output_tokens == 12 for request in requests)
    assert any(request.cached_tokens % 4 for request in requests)
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    assert all_pages_are_back(harness.executor)
