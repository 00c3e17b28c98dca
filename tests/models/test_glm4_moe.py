"""GLM-4.5: logits of transformers, and what is refused. test_mtp.py tests its further layer, and
test_published.py its published configurations."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.models.glm4_moe import save_glm4_moe
from tests.models.helpers import (
    MAX_POSITIONS,
    assert_logits_in_all_ways,
    random_tokens,
    reference_logits,
)
from tests.models.published_glm import GLM_45
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.models.registry import model_config, model_config_of

TOKENS = random_tokens(MAX_POSITIONS, seed=3)
MODELS: dict[str, dict[str, Any]] = {
    "GLM-4.5": {},
    "GLM-4.5-Air": {"use_qk_norm": False, "routed_scaling_factor": 1.0},
    "groups, two shared experts, no biases": {
        "attention_bias": False,
        "n_group": 4,
        "n_shared_experts": 2,
        "topk_group": 2,
    },
    "a quarter rotated": {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.25}},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
@pytest.mark.thinned(3)
def test_logits_equal_transformers(kind: type[HeadsBackend], name: str, tmp_path: Path) -> None:
    expected = reference_logits(save_glm4_moe(tmp_path, **MODELS[name]), TOKENS)
    assert_logits_in_all_ways(tmp_path, kind, expected, TOKENS)


def test_a_missing_key_has_the_default_of_transformers() -> None:
    """But for the layers that predict further tokens: without the key there are none."""
    own = {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128}
    theirs = transformers.Glm4MoeConfig(head_dim=128).to_dict() | own
    theirs |= {"dtype": None, "num_nextn_predict_layers": 0}
    assert model_config_of(own) == model_config_of(theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rotary_factor": 0.01}, r"partial_rotary_factor is 0\.01; of 128 elements"),
        ({"num_experts_per_tok": 161}, "num_experts_per_tok is 161; accepted is 1 to"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_45 | change))
    with pytest.raises(ValueError, match=message):
        model_config(tmp_path)
