"""How many pages the cache gets: `max_tokens` and memory, whichever is less."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.config import LlmArgs
from tllm_spec.executor.engine.memory_plan import DUMMY_PAGES, plan_num_pages
from tllm_spec.llm import LLM

GEOMETRY = AttentionGeometry(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
PAGE_BYTES = KVPool.page_bytes(GEOMETRY, 32, torch.float32)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model on a GPU that has room for its activations and 200 pages."""
    config = SimpleNamespace(
        attention_geometry=lambda mapping: GEOMETRY,
        hidden_size=8,
        intermediate_size=8,
        vocab_size=8,
    )
    activations = 64 * (8 * 8 + 4 * 8) * 4 + 10 * 64 * 8 * 4
    free = activations + 200 * PAGE_BYTES
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    return SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("max_tokens", "num_pages"), [(320, 10), (321, 11), (10**6, 100), (None, 100)]
)
def test_a_gpus_cache_has_the_tokens_asked_for_as_far_as_the_share_of_memory_goes(
    on_gpu: Any, max_tokens: int | None, num_pages: int
) -> None:
    cache = {"max_tokens": max_tokens, "free_gpu_memory_fraction": 0.5}
    args = LlmArgs(model="m", max_num_tokens=64, kv_cache_config=cache)
    assert plan_num_pages(args, [on_gpu], max_len=2048) == num_pages + DUMMY_PAGES


def test_a_cache_larger_than_the_machine_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_config.max_tokens = 1000000000000000 takes \d+ bytes"
    ):
        LLM("zoo:llama", kv_cache_config={"max_tokens": 10**15})
