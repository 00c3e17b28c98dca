"""Gemma 3's text model: logits of transformers beyond the window, rounding in 16 bits, folders as
published, and what is refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.helpers import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    PagedRunner,
    load,
    random_tokens,
    reference_logits,
    use,
)
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention

WINDOW = 7
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
# Frequencies so high that 64 positions tell the two rotary embeddings apart.
ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
}


def save_gemma3(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Write a random text model to `folder`; returns it."""
    layers = {"layer_types": TYPES, "rope_parameters": ROPES}
    settings = transformers.Gemma3TextConfig(**(SIZES | layers | config))
    model = transformers.Gemma3ForCausalLM(settings).eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder)
    return model


def randomise(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3))


MODELS: dict[str, dict[str, Any]] = {
    "two rotary embeddings": {},
    "only windows": {"layer_types": ["sliding_attention"] * 4},
    "biases, an output layer of its own": {"attention_bias": True, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_beyond_the_window_logits_equal_transformers(
    kind: type[HeadsBackend], name: str, tmp_path: Path
) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    expected = reference_logits(save_gemma3(tmp_path, **MODELS[name]), tokens)
    runner = PagedRunner(load(tmp_path), num_pages=128)
    use(runner, kind)

    def check(found: torch.Tensor, start: int = 0) -> None:
        torch.testing.assert_close(found, expected[start : start + len(found)], rtol=0, atol=1e-4)

    check(runner.step({0: tokens})[0])
    parts = [*pairwise((0, 3, 14, 25, 64))]
    check(torch.cat([runner.step({1: tokens[start:end]})[1] for start, end in parts]))
    eights = [runner.step(windows={3: tokens[i : i + 8]})[3] for i in range(0, 64, 8)]
    check(torch.cat(eights))
    runner.rewind(3, 11)
    mixed = runner.step({4: tokens[:30]}, {3: tokens[53:61]})
    check(mixed[3], 53)
    check(mixed[4])
