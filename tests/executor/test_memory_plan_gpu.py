"""What a GPU really allocates stays within what the memory plan sets aside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness
from tests.executor.sampling.test_sampler import WAYS
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.engine.memory_plan import round_bytes

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}  # Llama 3 8B's
PLAIN = {name: way for name, way in WAYS.items() if "logits_processor" not in way}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of an 8B model, for dummy weights."""
    folder = tmp_path_factory.mktemp("wide")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **WIDE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft_model(folder: Path) -> dict[str, Any]:
    return {
        "decoding_type": "Draft_Target",
        "speculative_model": str(folder),
        "load_format": "dummy",
        "max_draft_len": 3,
        "draft_target_one_model": True,
    }


def many_short_prompts(harness: Harness) -> None:
    """A full forward of prompts, then rounds of 2,048 windows with all ways of sampling."""
    ways = list(PLAIN.values())
    for number in range(2048):
        harness.submit([number % 64 + 1] * 4, 6, seed=number, **ways[number % len(ways)])


def one_long_prompt(harness: Harness) -> None:
    harness.submit([number % 64 for number in range(8192)], 2, prompt_logprobs=2)


@pytest.mark.parametrize("traffic", [many_short_prompts, one_long_prompt])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_round_allocates_no_more_than_is_set_aside_for_it(
    wide: Path, speculates: bool, traffic: Callable[[Harness], None]
) -> None:
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_batch_size": 2048,
        "max_seq_len": 8200,
        "kv_cache_config": {"max_tokens": 1 << 16},
        "cuda_graph_config": None,
    }
    if speculates:
        options["speculative_config"] = draft_model(wide)
    harness = Harness(wide, **options)
    target = harness.parts.runner.engine.model
    models = [target, target] if speculates else [target]
    planned = round_bytes(LlmArgs.from_kwargs(str(wide), **options), models)
    traffic(harness)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    harness.run()
    used = torch.cuda.max_memory_allocated() - before
    print(f"{traffic.__name__}, speculating {speculates}: {used} of {planned} bytes")
    assert used <= planned
