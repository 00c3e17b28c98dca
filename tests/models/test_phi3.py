"""Phi-3: short and long factors of longrope, and slices of fused tensors. test_families.py has its
logits and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.helpers import (
    CPU,
    MAX_POSITIONS,
    PagedRunner,
    load,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tests.models.published import PHI4_MINI
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.layers import Placement
from tllm_spec.models.registry import model_config, model_config_of, model_type
from tllm_spec.models.weights import load_weights

ORIGINAL = 24
# A head has 16 elements, of which 12 are rotated.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}
MODELS_OF: dict[str, dict[str, Any]] = {
    "Phi-3-mini": {},
    "a window": {"sliding_window": 7},
    "Phi-4-mini": LONG,
    "a part rotated, a window": {
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "sliding_window": 7,
    },
}


def save(folder: Path, name: str = "Phi-4-mini", **more: Any) -> Any:
    return save_checkpoint(folder, "Phi3", pad_token_id=0, **(MODELS_OF[name] | more))


def test_factors_are_chosen_by_the_longest_request_and_not_by_its_drafts(tmp_path: Path) -> None:
    tokens = random_tokens(ORIGINAL, seed=3)
    expected = reference_logits(save(tmp_path), tokens)  # short, since the text is
    found = []
    for max_seq_len in (ORIGINAL, ORIGINAL + 1):
        model = load(tmp_path, max_positions=ORIGINAL + 9, max_seq_len=max_seq_len)
        found.append(PagedRunner(model).step({0: tokens})[0])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-4)
    assert (found[1] - expected).abs().max() > 1e-2


def test_slices_of_ranks_are_together_the_checkpoints_tensors(tmp_path: Path) -> None:
    save(tmp_path)
    config, whole = model_config(tmp_path), load(tmp_path)
    parts = {"qkv_proj": [64, 32, 32], "gate_up_proj": [96, 96]}
    slices: dict[str, list[torch.Tensor]] = {name: [] for name in parts}
    for rank in range(2):
        placement = Placement(torch.float32, CPU, Mapping(rank, 2, 2))
        model = model_type(config)(config, MAX_POSITIONS, placement)
        load_weights(model, tmp_path)
        layer = model.model.layers[1]
        slices["qkv_proj"].append(layer.self_attn.qkv_proj.full_weight())
        slices["gate_up_proj"].append(layer.mlp.gate_up_proj.full_weight())
    modules = dict(whole.named_modules())
    for name, sizes in parts.items():
        block = "self_attn" if name == "qkv_proj" else "mlp"
        weight = modules[f"model.layers.1.{block}.{name}"].full_weight()
        halves = [each.split([size // 2 for size in sizes]) for each in slices[name]]
        joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
        assert torch.equal(torch.cat(joined), weight)


def test_the_published_config_of_phi_4_mini_is_read() -> None:
    config = model_config_of(PHI4_MINI)
    assert (config.head_dim, config.rope.partial_factor, config.rope.kind) == (
        128,
        0.75,
        "longrope",
    )
    assert config.rope.kind == "longrope" and config.rope.is_long
    assert not config.rope.for_length(4096).is_long
    assert config.rope.factor == 32 and config.rope.original_max_positions == 4096
    assert config.tie_word_embeddings and config.eos_token_ids == (199999,)
    assert config.max_positions == 131072
    assert config.within(131072).sliding_window is None
    su = PHI4_MINI["rope_scaling"] | {"type": "su"}
    assert model_config_of(PHI4_MINI | {"rope_scaling": su}) == config


def test_longrope_of_other_models_is_refused() -> None:
    raw = PHI4_MINI | {"architectures": ["LlamaForCausalLM"], "partial_rotary_factor": None}
    with pytest.raises(ValueError, match="rope_type is 'longrope'; served are default, linear"):
        model_config_of(raw)
