"""Qwen3-Next: logits of transformers in prompts, chunks and windows."""

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
)

LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
}


def save_qwen3_next(folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Write a random model to `folder`; returns it."""
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(SIZES | config)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.dim() > 1 and "conv1d" not in name
            parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if is_matrix else 0.3))
            if name.endswith("linear_attn.norm.weight"):
                parameter.add_(1)
    model.eval().to(dtype).save_pretrained(folder)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "a state in the last layer": {},
    "attention in the last layer, biases": {
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "a dense layer, a short convolution, one head for each key": {
        "mlp_only_layers": [1],
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 2,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompts_chunks_and_windows_equal_transformers(name: str, tmp_path: Path) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    expected = reference_logits(save_qwen3_next(tmp_path, **MODELS[name]), tokens)
    runner = PagedRunner(load(tmp_path), num_pages=128)

    def check(found: torch.Tensor, start: int = 0) -> None:
        torch.testing.assert_close(found, expected[start : start + len(found)], rtol=0, atol=1e-4)

    check(runner.step({0: tokens})[0])
    parts = [*pairwise((0, 3, 14, 25, 64))]
    check(torch.cat([runner.step({1: tokens[start:end]})[1] for start, end in parts]))
    eights = [runner.step(windows={3: tokens[i : i + 8]})[3] for i in range(0, 64, 8)]
    check(torch.cat(eights))
    runner.rewind(3, 5)
    mixed = runner.step({4: tokens[:30]}, {3: tokens[59:62]})
    check(mixed[3], 59)
    check(mixed[4])
    check(torch.cat([runner.step(windows={4: [token]})[4] for token in tokens[30:]]), 30)
