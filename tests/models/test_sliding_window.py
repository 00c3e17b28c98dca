"""Sliding windows of Mistral, Qwen and Mixtral: which layers have one, and the logits of
transformers in texts several times as long."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.helpers import (
    MAX_POSITIONS,
    PagedRunner,
    assert_logits_in_all_ways,
    load,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.visible_keys import KeySpan

WINDOW = 7
SLIDES = {"use_sliding_window": True, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES = ["sliding_attention", "full_attention"]
# Of each model: the architecture, its options, and the layers with a window.
MODELS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "Mistral": ("Mistral", {}, [0, 1]),
    "Qwen2, the last layers": ("Qwen2", SLIDES | {"max_window_layers": 1}, [1, 2, 3]),
    "Qwen2, layers by type": ("Qwen2", SLIDES | {"layer_types": TYPES * 2}, [0, 2]),
    "Qwen3": ("Qwen3", SLIDES | {"max_window_layers": 2, "head_dim": 16}, [2, 3]),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}, [0, 1]),
    "Qwen2-MoE": ("Qwen2Moe", SLIDES | EXPERTS | {"max_window_layers": 3}, [0, 2]),
    "Qwen3-MoE": ("Qwen3Moe", SLIDES | EXPERTS | {"head_dim": 16}, [0, 1, 2, 3]),
}


def save(folder: Path, name: str, window: int | None = WINDOW) -> Any:
    architecture, options, _ = MODELS[name]
    return save_checkpoint(folder, architecture, **(options | {"sliding_window": window}))


@pytest.mark.parametrize("name", MODELS)
def test_layers_with_and_without_a_window_are_groups(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    config, sliding = load(tmp_path).config, MODELS[name][2]
    groups = {group.geometry.span: group for group in config.layer_groups(SINGLE_RANK)}
    assert list(groups[KeySpan(WINDOW, slides=True)].layers) == sliding
    others = [layer for layer in range(config.num_layers) if layer not in sliding]
    assert list(groups[None].layers if None in groups else ()) == others
    assert [group.layers[0] for group in groups.values()] == sorted(
        group.layers[0] for group in groups.values()
    )


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
def test_beyond_the_window_logits_equal_transformers(
    kind: type[HeadsBackend], name: str, tmp_path: Path
) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    expected = reference_logits(save(tmp_path, name), tokens)
    assert_logits_in_all_ways(tmp_path, kind, expected, tokens)


@pytest.mark.parametrize("name", MODELS)
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
