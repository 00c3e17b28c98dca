"""Families without a module of their own here: logits of transformers with every backend, what a
missing key means, and what is refused. test_mtp.py tests GLM-4.5's further layer, and
test_published.py its published configurations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.glm4_moe import SIZES as GLM
from tests.models.helpers import (
    MAX_POSITIONS,
    assert_logits_in_all_ways,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tests.models.published import GLM_45
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.models.layers import Placement
from tllm_spec.models.registry import model_config, model_config_of, model_type
from tllm_spec.models.weights import load_weights

TOKENS = random_tokens(MAX_POSITIONS, seed=3)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": ("Glm4Moe", {}),
    "GLM-4.5-Air": ("Glm4Moe", {"use_qk_norm": False, "routed_scaling_factor": 1.0}),
    "groups, two shared experts, no biases": (
        "Glm4Moe",
        {
            "attention_bias": False,
            "n_group": 4,
            "n_shared_experts": 2,
            "topk_group": 2,
        },
    ),
    "a quarter rotated": (
        "Glm4Moe",
        {"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.25}},
    ),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 2, biases": ("Olmo2", {"attention_bias": True, "head_dim": 32}),
}
SIZES = {"Glm4Moe": GLM, "Olmo2": {}}
# Without the key no further layers are in the file.
DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Glm4Moe": ({"head_dim": 128}, {"num_nextn_predict_layers": 0}),
    "GptOss": ({}, {"eos_token_id": None}),
    "Olmo2": ({}, {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
@pytest.mark.thinned(3)
def test_logits_equal_transformers(kind: type[HeadsBackend], name: str, tmp_path: Path) -> None:
    family, change = MODELS[name]
    reference = save_checkpoint(tmp_path, family, **SIZES[family] | change)
    assert_logits_in_all_ways(tmp_path, kind, reference_logits(reference, TOKENS), TOKENS)


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_missing_key_has_the_default_of_transformers(family: str) -> None:
    given, absent = DEFAULTS[family]
    own = given | {"architectures": [f"{family}ForCausalLM"]}
    theirs = getattr(transformers, f"{family}Config")(**given).to_dict() | own
    assert model_config_of(own) == model_config_of(theirs | absent | {"dtype": None})


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_ranks_norm_their_heads_together(num_kv_heads: int, tmp_path: Path) -> None:
    """With one head of k both ranks have it."""
    reference = save_checkpoint(tmp_path, "Olmo2", num_key_value_heads=num_kv_heads)
    theirs, config = reference.model.layers[1].self_attn, model_config(tmp_path)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def heads_of(communicator: Communicator) -> torch.Tensor:
        cpu = torch.device("cpu")
        placement = Placement(torch.float32, cpu, communicator.mapping, communicator=communicator)
        model = model_type(config)(config, MAX_POSITIONS, placement)
        load_weights(model, tmp_path)
        heads: torch.Tensor = model.model.layers[1].self_attn._heads(hidden, None)[0]
        return heads

    both = ThreadGroup().run(heads_of)
    with torch.inference_mode():
        q, k = (
            norm(proj(hidden))
            for norm, proj in ((theirs.q_norm, theirs.q_proj), (theirs.k_norm, theirs.k_proj))
        )
    found = [heads.split_with_sizes((2, 1, 1), 1) for heads in both]
    torch.testing.assert_close(torch.cat([each[0].flatten(1) for each in found], 1), q)
    keys = [each[1].flatten(1) for each in found]
    torch.testing.assert_close(torch.cat(keys if num_kv_heads > 1 else keys[:1], 1), k)
    assert num_kv_heads > 1 or torch.equal(*keys)


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
