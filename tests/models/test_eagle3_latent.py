"""EAGLE-3 heads with latent attention, as Kimi K2.5's: they compute what their reference computes
without a cache, and keys and tensors that are not served are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.deepseek import save_deepseek
from tests.models.eagle3_runner import captured_states, load_head
from tests.models.helpers import load
from tests.models.latent_reference import LatentReference
from tests.models.test_eagle3 import TOKENS, assert_drafts_like_the_reference
from tests.models.tiny_eagle3 import edit_config, rewrite, write_tiny_eagle3
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.llama import CausalLM

YARN = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
    "type": "yarn",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "of V3, under layers": {
        "architectures": ["Eagle3DeepseekV3ForCausalLM"],
        "spelling": "layers",
        "draft_vocab_size": 64,
    },
    "norms of EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual, two layers": {"norm_before_residual": True, "num_layers": 2},
    "YaRN": {"rope_scaling": YARN, "rope_theta": 50000.0},
    "no q_lora": {"q_lora_rank": None},
    "a wide epsilon": {"rms_norm_eps": 0.5},
}


@pytest.fixture
def target(tmp_path: Path) -> CausalLM:
    return load(write_tiny_llama(tmp_path / "target", num_layers=6))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_with_latents_equals_its_reference(
    name: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", latent=True, **VARIANTS[name])
    head, captured = load_head(folder, target), captured_states(target, TOKENS, (0, 1, 2))
    assert_drafts_like_the_reference(head, LatentReference(folder, target), captured)


def test_a_head_with_latents_drafts_for_a_target_with_latents(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "target", "DeepseekV3")
    target = load(tmp_path / "target")
    sizes = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 128}
    folder = write_tiny_eagle3(tmp_path / "head", latent=True, **sizes)
    head, captured = load_head(folder, target), captured_states(target, TOKENS, (0, 1, 2))
    assert_drafts_like_the_reference(head, LatentReference(folder, target), captured)


def test_a_published_config_is_read() -> None:
    config = Eagle3Config.from_dict(
        {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "vocab_size": 163840,
            "draft_vocab_size": 163840,
            "rope_theta": 50000.0,
            "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
            # Those of the target, which some heads repeat.
            "n_routed_experts": 384,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "num_experts_per_tok": 8,
            "ep_size": 1,
        }
    )
    assert config.capture_layers == (1, 29, 57)
    assert config.moe is None and config.num_nextn_layers == 0
    assert config.mla is not None and config.mla.norm_eps == 1e-5
    (group,) = config.layer_groups(Mapping(0, 8, 8))
    assert isinstance(group.geometry, LatentGeometry)
    assert (group.geometry.num_heads, group.geometry.latent_dim) == (8, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is 8, and only None is served"),
        ({"mlp_bias": True}, "mlp_bias is True, and only False is served"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"clip_qkv": 7}, "clip_qkv is 7, which is not served"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "o_proj.weight has the shape"),
    ],
)
def test_keys_that_are_not_served_are_named(
    changes: dict[str, Any], message: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", latent=True)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target)


def test_tensors_of_experts_are_named(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", latent=True)
    router = {"midlayer.mlp.gate.weight": torch.zeros(4, 32)}
    rewrite(folder, lambda tensors: tensors.update(router))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate\.weight"):
        load_head(folder, target)
