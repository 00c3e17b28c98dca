"""All families: logits of transformers with every backend, what a missing key means, and what is
refused. test_mtp.py tests GLM-4.5's further layer, test_published.py published configurations."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.deepseek import MISTRAL4
from tests.models.fp8_checkpoint import quantise
from tests.models.gemma4 import KINDS, save_larger
from tests.models.glm4_moe import SIZES as GLM
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import (
    MAX_POSITIONS,
    assert_logits_in_all_ways,
    check_same_logits,
    load,
    quantised_pair,
    random_tokens,
    reference_logits,
    save_checkpoint,
)
from tests.models.published import GEMMA3_270M, GLM_45, GPT_OSS_20B, MINIMAX_M2, PHI4_MINI, Raw
from tests.models.published_states import QWEN3_NEXT
from tests.models.qwen3_next import FULL, LINEAR
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import LONG, save_llama4
from tests.models.test_llama4 import MODELS as LLAMA4
from tests.models.test_phi3 import MODELS_OF as PHI3
from tests.models.test_phi3 import save as save_phi3
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.models.layers import Placement
from tllm_spec.models.registry import model_config, model_config_of, model_type
from tllm_spec.models.weights import load_weights
from tllm_spec.zoo.quantise import Style
from tllm_spec.zoo.quantise import quantise as quantise_int4

TOKENS = random_tokens(MAX_POSITIONS, seed=3)
MINIMAX: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
# The queries' scale grows at every tenth position.
SCALED: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 6.4}
SCALED |= {"original_max_position_embeddings": 10, "llama_4_scaling_beta": 0.7}
SCALED |= {"mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL: dict[str, Any] = {"head_dim": 16, "rope_parameters": SCALED}
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
    "MiniMax M2": ("MiniMaxM2", {}),
    "MiniMax M2, all of a head rotated": ("MiniMaxM2", {"rope_parameters": {"rope_theta": 100.0}}),
    "Ministral 3": ("Ministral3", {}),
    "Ministral 3, windows": ("Ministral3", {"sliding_window": 9}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 2, biases": ("Olmo2", {"attention_bias": True, "head_dim": 32}),
    "Gemma 3, two rotary embeddings": ("Gemma3", {}),
    "Gemma 3, only windows": ("Gemma3", {"layer_types": ["sliding_attention"] * 4}),
    "Gemma 3, biases, an output layer of its own": (
        "Gemma3",
        {"attention_bias": True, "tie_word_embeddings": False},
    ),
    **{f"Gemma 4, {kind}": ("Gemma4", {"kind": kind}) for kind in KINDS},
    "gpt-oss, windows in every second layer": ("GptOss", {}),
    "gpt-oss, all layers see all keys": ("GptOss", {"layer_types": ["full_attention"] * 4}),
    "gpt-oss, no biases of attention": ("GptOss", {"attention_bias": False}),
    **{f"Llama 4, {name}": ("Llama4", change) for name, change in (LLAMA4 | LONG).items()},
    **{name: ("Phi3", {"name": name}) for name in PHI3},
}
SAVE: dict[str, Callable[..., Any]] = {
    "Gemma3": save_gemma3,
    "Gemma4": save_larger,
    "Glm4Moe": partial(save_checkpoint, architecture="Glm4Moe", **GLM),
    "GptOss": save_gpt_oss,
    "Llama4": save_llama4,
    "MiniMaxM2": partial(save_checkpoint, architecture="MiniMaxM2", **MINIMAX),
    "Ministral3": partial(save_checkpoint, architecture="Ministral3", **MINISTRAL),
    "Mistral4": partial(save_checkpoint, architecture="Mistral4", **MISTRAL4),
    "Olmo2": partial(save_checkpoint, architecture="Olmo2"),
    "Phi3": save_phi3,
}
# Without the key no further layers are in the file.
DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Glm4Moe": ({"head_dim": 128}, {"num_nextn_predict_layers": 0}),
    "Gemma4": ({"num_hidden_layers": 12}, {}),
    "GptOss": ({}, {"eos_token_id": None}),
    "Llama4": (
        {"vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 5}
        | {"num_attention_heads": 40},
        {},
    ),
    "MiniMaxM2": ({}, {}),
    "Ministral3": ({}, {}),
    "Mistral4": ({}, {}),
    "Olmo2": ({}, {}),
}
SMALL = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 32}
for _family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"):
    DEFAULTS[_family] = (SMALL, {})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [VanillaAttention, TritonAttention, BatchInvariantAttention])
@pytest.mark.covering
def test_logits_beyond_windows_and_chunks_equal_transformers(
    kind: type[HeadsBackend], name: str, tmp_path: Path
) -> None:
    family, change = MODELS[name]
    reference = SAVE[family](tmp_path, **change)
    assert_logits_in_all_ways(tmp_path, kind, reference_logits(reference, TOKENS), TOKENS)


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_missing_key_has_the_default_of_transformers(family: str) -> None:
    given, absent = DEFAULTS[family]
    own = given | {"architectures": [f"{family}ForCausalLM"]}
    kind = f"{family}Text" if family in ("Llama4", "Gemma4") else family
    theirs = getattr(transformers, f"{kind}Config")(**given).to_dict() | own
    assert model_config_of(own) == model_config_of(theirs | absent | {"dtype": None})


STORED = {
    "MiniMaxM2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    "Ministral3": "model.layers.1.self_attn.q_proj.weight",
    "Mistral4": "model.layers.1.mlp.shared_experts.up_proj.weight",
}


@pytest.mark.parametrize("family", STORED)
def test_a_tensor_missing_and_one_too_many_are_named(family: str, tmp_path: Path) -> None:
    SAVE[family](tmp_path)
    file, name = tmp_path / "model.safetensors", STORED[family]
    tensors = load_file(file)
    tensors["model.layers.2.extra"] = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(ValueError) as refused:
        load(tmp_path)
    assert f"missing {name}; surplus model.layers.2.extra." in str(refused.value)


WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
QUANTISE: dict[int, Any] = {4: partial(quantise_int4, style=Style("gptq")), 8: quantise}


@pytest.mark.covering
@pytest.mark.parametrize("bits", QUANTISE)
@pytest.mark.parametrize(
    ("family", "change"), [("Gemma3", WIDE), ("Phi3", {}), ("MiniMaxM2", WIDE)]
)
def test_quantised_weights_give_the_logits_of_their_values(
    family: str, change: dict[str, Any], bits: int, tmp_path: Path
) -> None:
    folders = quantised_pair(tmp_path, partial(SAVE[family], **change), QUANTISE[bits])
    models = [load(folder) for folder in folders]
    assert not models[0].config.quantisation.is_plain
    check_same_logits(*models, tokens=TOKENS[:40])


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
        heads: torch.Tensor = model.model.layers[1].self_attn._inputs(hidden, None)[0]
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


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
LONGROPE: Raw = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
LONGROPE["original_max_position_embeddings"] = 24
# A published configuration, what is changed, and what is named.
REFUSED: list[tuple[Raw, Raw, str]] = [
    (GLM_45, {"partial_rotary_factor": 0.01}, r"partial_rotary_factor is 0\.01; of 128 elements"),
    (GLM_45, {"num_experts_per_tok": 161}, "num_experts_per_tok is 161; accepted is 1 to"),
    (GLM_45, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (PHI4_MINI, {"rope_scaling": LONGROPE}, "short_factor has 6 entries; it must have 48"),
    (PHI4_MINI, {"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7; of 128 elements"),
    (
        PHI4_MINI,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_type is 'linear'; served are default, longrope",
    ),
    (MINIMAX_M2, {"scoring_func": "softmax"}, 'scoring_func is "softmax"; served is "sigmoid"'),
    (MINIMAX_M2, {"use_qk_norm": False}, "use_qk_norm is false; served is true"),
    (MINIMAX_M2, {"rotary_dim": 63}, "of 128 elements a head, an even number must be rotated"),
    (GEMMA3_270M, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (GEMMA3_270M, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    (GEMMA3_270M, {"use_bidirectional_attention": True}, "use_bidirectional_attention is"),
    (GEMMA3_270M, {"hidden_activation": "silu"}, "hidden_activation is 'silu'.*gelu_pytorch"),
    (GEMMA3_270M, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 18"),
    (
        GEMMA3_270M,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    (GEMMA3_270M, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number"),
    (GPT_OSS_20B, {"swiglu_alpha": 1.5}, r"swiglu_alpha is 1\.5; only 1\.702"),
    (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number"),
    (GPT_OSS_20B, {"quantization_config": AWQ}, "GptOssForCausalLM has other quantised weights"),
    (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "has other quantised weights"),
    (
        GPT_OSS_20B,
        {"architectures": ["Qwen3MoeForCausalLM"]},
        "'mxfp4', which is served for GptOss",
    ),
    (
        QWEN3_NEXT,
        {"layer_types": ["sliding_attention"] * 48},
        "layer_types has .'sliding_attention",
    ),
    (QWEN3_NEXT, {"layer_types": [FULL]}, "layer_types has 1 entries for 48 layers"),
    (QWEN3_NEXT, {"layer_types": [LINEAR] * 48}, "at least one layer must have"),
    (QWEN3_NEXT, {"linear_num_key_heads": 12}, "linear_num_key_heads is 12; it must divide"),
    (
        QWEN3_NEXT,
        {"attn_output_gate": False},
        "attn_output_gate is false; attention is served with",
    ),
    (QWEN3_NEXT, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; of 256 elements"),
    (QWEN3_NEXT, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; served are 0"),
]


@pytest.mark.parametrize(
    ("base", "change", "message"),
    REFUSED,
    ids=[f"{base['architectures'][0]} {' '.join(change)}" for base, change, _ in REFUSED],
)
def test_what_is_not_served_is_refused_by_name(
    base: Raw, change: Raw, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base | change))
    with pytest.raises(ValueError, match=message):
        model_config(tmp_path)
