"""Logits of every architecture and RoPE type equal those of transformers, for any split of the
tokens into forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.deepseek import MODELS as DEEPSEEK_MODELS
from tests.models.helpers import PagedRunner, load, random_tokens, reference_logits, save_checkpoint

TOKENS = random_tokens(40)

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, all biases, tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, no groups": ("Llama", {"num_key_value_heads": 4}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "mistral": ("Mistral", {"head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "mixtral": ("Mixtral", {}),
    "qwen2 moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2 moe, no bias": ("Qwen2Moe", EXPERTS | {"qkv_bias": False, "norm_topk_prob": True}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3 moe, bias": ("Qwen3Moe", EXPERTS | {"attention_bias": True}),
    "qwen3 moe, dense first layer": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3 moe, dense last layer": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [1]}),
    **DEEPSEEK_MODELS,
    "wide enough for packed weights": ("Llama", {"intermediate_size": 1024, "vocab_size": 1024}),
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.3},
    "yarn, betas": YARN | {"beta_fast": 1.0, "beta_slow": 0.3},
    "yarn, betas, no truncation": YARN | {"beta_fast": 1.0, "beta_slow": 0.3, "truncate": False},
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.3, "logits this flat would hide a difference"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_single_tokens_and_windows_equal_transformers(
    name: str, tmp_path: Path
) -> None:
    architecture, config = MODELS[name]
    expected = reference_logits(save_checkpoint(tmp_path, architecture, **config), TOKENS)
    runner = PagedRunner(load(tmp_path))
    assert_close(runner.step({0: TOKENS})[0], expected)
    chunks = [
        runner.step({1: TOKENS[start:end]})[1] for start, end in ((0, 5), (5, 6), (6, 25), (25, 40))
    ]
    assert_close(torch.cat(chunks), expected)
    single = [runner.step(windows={2: [token]})[2] for token in TOKENS]
    assert_close(torch.cat(single), expected)
    fours = [runner.step(windows={3: TOKENS[start : start + 4]})[3] for start in range(0, 40, 4)]
    assert_close(torch.cat(fours), expected)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_type_equals_transformers(name: str, tmp_path: Path) -> None:
    expected = reference_logits(
        save_checkpoint(tmp_path, "Llama", rope_parameters=ROPES[name]), TOKENS
    )
    runner = PagedRunner(load(tmp_path))
    prefill = runner.step({0: TOKENS[:30]})[0]
    decode = [runner.step(windows={0: [token]})[0] for token in TOKENS[30:]]
    assert_close(torch.cat((prefill, *decode)), expected)


@pytest.mark.parametrize("window", [1, 4])
def test_contexts_and_windows_in_one_batch_are_independent(window: int, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "Qwen3", head_dim=32)
    runner = PagedRunner(load(tmp_path))
    texts = {request: random_tokens(40, seed=request) for request in range(5)}
    cached = {0: 0, 1: 7, 2: 3, 3: 17, 4: 32}
    runner.step({request: texts[request][:count] for request, count in cached.items() if count})
    new = {
        request: texts[request][count : count + (9 - request if request < 2 else window)]
        for request, count in cached.items()
    }
    logits = runner.step({0: new[0], 1: new[1]}, {2: new[2], 3: new[3], 4: new[4]}, slack=5)
    for request, tokens in new.items():
        expected = reference_logits(reference, texts[request][: cached[request] + len(tokens)])
        assert_close(logits[request], expected[cached[request] :])


def test_tokens_after_a_rewind_replace_the_rejected_ones(tmp_path: Path) -> None:
    expected = reference_logits(save_checkpoint(tmp_path, "Llama"), TOKENS)
    runner = PagedRunner(load(tmp_path))
    runner.step({0: TOKENS[:10]})
    runner.step(windows={0: [TOKENS[10], 3, 1, 4]})
    runner.rewind(0, 3)
    assert_close(runner.step(windows={0: TOKENS[11:15]})[0], expected[11:15])


def test_bfloat16_follows_transformers_in_bfloat16(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, "Qwen3", head_dim=32).to(torch.bfloat16)
    runner = PagedRunner(load(tmp_path, dtype=torch.bfloat16))
    logits = runner.step({0: TOKENS})[0]
    expected = reference_logits(reference, TOKENS).float()
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "qwen3 moe", "qwen2 moe", "mixtral"])
@pytest.mark.parametrize("window", [1, 4])
def test_a_gpu_gives_the_logits_of_the_cpu(window: int, name: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    save_checkpoint(tmp_path, architecture, **config)
    runners = [
        PagedRunner(load(tmp_path, device=torch.device(device))) for device in ("cpu", "cuda")
    ]
    steps = [
        ({0: TOKENS[:9], 1: TOKENS[:5]}, {}),
        ({1: TOKENS[5:30]}, {0: TOKENS[9 : 9 + window]}),
        ({}, {0: TOKENS[20 : 20 + window], 1: TOKENS[30 : 30 + window]}),
    ]
    for contexts, windows in steps:
        expected, actual = (runner.step(contexts, windows, slack=3) for runner in runners)
        for request in expected:
            torch.testing.assert_close(actual[request].cpu(), expected[request], rtol=0, atol=1e-3)
