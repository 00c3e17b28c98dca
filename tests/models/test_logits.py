"""Logits of every architecture and RoPE type equal those of transformers, for any split of the
tokens into forwards, beyond sliding windows, and in rows of draft trees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.tree_problem import bits_of, random_paths
from tests.models.deepseek import MISTRAL4
from tests.models.deepseek import MODELS as DEEPSEEK_MODELS
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import (
    MAX_POSITIONS,
    PagedRunner,
    assert_close,
    assert_logits_in_all_ways,
    load,
    random_tokens,
    reference_logits,
    save_checkpoint,
    use,
)
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import AttentionMetadata, HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.visible_keys import KeySpan, TreeMask

TOKENS, LONG = random_tokens(40), random_tokens(MAX_POSITIONS, seed=3)

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
    "mistral 4": ("Mistral4", MISTRAL4),
    "mistral 4, dense first layer, no q_lora": (
        "Mistral4",
        MISTRAL4 | {"first_k_dense_replace": 1, "q_lora_rank": None, "norm_topk_prob": False},
    ),
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


@pytest.mark.thinned
@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_single_tokens_and_windows_equal_transformers(
    name: str, tmp_path: Path
) -> None:
    architecture, config = MODELS[name]
    expected = reference_logits(save_checkpoint(tmp_path, architecture, **config), LONG)
    assert expected.std() > 0.3, "logits this flat would hide a difference"
    assert_logits_in_all_ways(tmp_path, VanillaAttention, expected, LONG)


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


WINDOW = 7
SLIDES = {"use_sliding_window": True, "num_hidden_layers": 4}
WINDOW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES = ["sliding_attention", "full_attention"]
# Of each model: the architecture, its options, and the layers with a window.
WINDOW_MODELS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "Mistral": ("Mistral", {}, [0, 1]),
    "Qwen2, the last layers": ("Qwen2", SLIDES | {"max_window_layers": 1}, [1, 2, 3]),
    "Qwen2, layers by type": ("Qwen2", SLIDES | {"layer_types": TYPES * 2}, [0, 2]),
    "Qwen3": ("Qwen3", SLIDES | {"max_window_layers": 2, "head_dim": 16}, [2, 3]),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}, [0, 1]),
    "Qwen2-MoE": ("Qwen2Moe", SLIDES | WINDOW_EXPERTS | {"max_window_layers": 3}, [0, 2]),
    "Qwen3-MoE": ("Qwen3Moe", SLIDES | WINDOW_EXPERTS | {"head_dim": 16}, [0, 1, 2, 3]),
}


def save(folder: Path, name: str, window: int | None = WINDOW) -> Any:
    architecture, options, _ = WINDOW_MODELS[name]
    return save_checkpoint(folder, architecture, **(options | {"sliding_window": window}))


@pytest.mark.parametrize("name", WINDOW_MODELS)
def test_layers_with_and_without_a_window_are_groups(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    config, sliding = load(tmp_path).config, WINDOW_MODELS[name][2]
    groups = {group.geometry.span: group for group in config.layer_groups(SINGLE_RANK)}
    assert list(groups[KeySpan(WINDOW, slides=True)].layers) == sliding
    others = [layer for layer in range(config.num_layers) if layer not in sliding]
    assert list(groups[None].layers if None in groups else ()) == others
    assert [group.layers[0] for group in groups.values()] == sorted(
        group.layers[0] for group in groups.values()
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", WINDOW_MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_beyond_the_window_logits_equal_transformers(
    kind: type[HeadsBackend], name: str, tmp_path: Path
) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    expected = reference_logits(save(tmp_path, name), tokens)
    assert_logits_in_all_ways(tmp_path, kind, expected, tokens)


@pytest.mark.parametrize("name", WINDOW_MODELS)
def test_the_window_changes_the_logits_of_all_positions_beyond_it_and_of_no_other(
    name: str, tmp_path: Path
) -> None:
    """The reference of the test above does what its name says."""
    tokens, found = random_tokens(MAX_POSITIONS, seed=3), []
    for window in (WINDOW, MAX_POSITIONS):
        save(tmp_path / str(window), name, window)
        found.append(PagedRunner(load(tmp_path / str(window))).step({0: tokens})[0])
    differs = (found[0] - found[1]).abs().amax(-1) > 1e-4
    assert not differs[:WINDOW].any() and differs[WINDOW:].all()


PROMPT, NUM_NODES = random_tokens(9), 12
# The tree starts in the first chunk, and its path of 7 nodes ends in the third one.
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.7,
    "no_rope_layer_interval": 2,
}
SAVERS: dict[str, Callable[[Path], Any]] = {
    "Olmo2": lambda folder: save_checkpoint(folder, "Olmo2"),
    "Llama": lambda folder: save_checkpoint(folder, "Llama"),
    "Llama4": lambda folder: save_llama4(folder, **LLAMA4),
    "gpt-oss": lambda folder: save_gpt_oss(folder, sliding_window=5),
    "Gemma3": lambda folder: save_gemma3(folder, sliding_window=5),
}


class TreeRunner(PagedRunner):
    """The windows of the next step are nodes of the tree with `paths`, after `offset` others."""

    paths: list[list[int]] | None = None
    offset = 0

    def metadata(self, *args: Any) -> AttentionMetadata:
        metadata = super().metadata(*args)
        if self.paths is not None:
            bits = torch.tensor([bits_of(self.paths)])
            metadata.tree = TreeMask(bits, self.offset + len(self.paths))
            depths = [len(path) - 1 for path in self.paths]
            metadata.positions = torch.tensor(depths) + len(PROMPT)
        return metadata


@pytest.mark.covering
@pytest.mark.parametrize("family", SAVERS)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_a_nodes_logits_are_those_of_the_prompt_and_its_path(
    kind: type[HeadsBackend], num_steps: int, family: str, tmp_path: Path
) -> None:
    reference = SAVERS[family](tmp_path)
    runner = TreeRunner(load(tmp_path))
    use(runner, kind)
    runner.step(contexts={0: PROMPT})
    tokens = random_tokens(NUM_NODES, seed=1)
    paths = random_paths(NUM_NODES, torch.Generator().manual_seed(3))
    size = NUM_NODES // num_steps
    for first in range(0, NUM_NODES, size):
        runner.paths, runner.offset = paths[first : first + size], first
        logits = runner.step(windows={0: tokens[first : first + size]})[0]
        for row, path in zip(logits, runner.paths, strict=True):
            sequence = PROMPT + [tokens[node] for node in path]
            torch.testing.assert_close(
                row, reference_logits(reference, sequence)[-1], rtol=1e-4, atol=1e-4
            )
