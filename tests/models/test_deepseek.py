"""DeepSeek's and GLM-5's published configurations, what is refused, and the indexer of V3.2 and
GLM-5. test_logits.py has their logits in all ways."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import is_projection, keeping_fp8, quantise
from tests.models.helpers import PagedRunner, check_same_logits, load, quantised_pair, random_tokens
from tests.models.published import FP8, V2_LITE, V3, V3_2
from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.models.mla_config import IndexConfig
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.weights import weight_table


def test_v2_lite_is_read_as_published() -> None:
    config = model_config_of(V2_LITE)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank is None
    assert config.sparse_layers == frozenset(range(1, 27)) and config.num_nextn_layers == 0
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.normalise_top_k) == ("softmax", 6, 1, False)
    assert moe.shared_intermediate_size == 2 * 1408 and not moe.has_correction_bias
    scale = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert config.layer_groups(SINGLE_RANK)[0].geometry == LatentGeometry(
        27, 16, 512, 64, 128, 128, pytest.approx(scale)
    )


def test_v3_is_read_as_published() -> None:
    config = model_config_of(V3)
    moe, mla = config.moe, config.mla
    assert moe is not None and mla is not None and mla.q_lora_rank == 1536 and mla.is_interleaved
    assert config.quantisation.fp8 is not None and config.num_nextn_layers == 1
    assert config.sparse_layers == frozenset(range(3, 61))
    assert (moe.scoring, moe.top_k, moe.num_groups, moe.top_groups) == ("sigmoid", 8, 8, 4)
    assert moe.normalise_top_k and moe.has_correction_bias and moe.routed_scaling_factor == 2.5


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (V3, {"attention_bias": True}, "attention_bias is true"),
        (V3, {"topk_method": "lottery"}, "topk_method is 'lottery'"),
        (V3, {"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true with topk_method 'greedy'"),
        (V3, {"num_experts_per_tok": 300}, "num_experts_per_tok is 300.* 256"),
        (V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok is 0"),
        (
            V3,
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "other quantized checkpoints are not served",
        ),
        (
            V3_2,
            {"mlp_layer_types": ["sparse"] * 61},
            r"mlp_layer_types is .*'dense' for the first.* = 3",
        ),
        (V3_2, {"layer_types": ["full_attention"] * 61}, "layer_types is .*served is 'indexed_att"),
        (V3_2, {"index_topk": None}, "index_topk is null"),
        (V3_2, {"q_lora_rank": None}, "q_lora_rank is None and .* an indexer needs the former"),
        (V3_2, {"index_head_dim": 32}, "index_head_dim is 32; .*qk_rope_head_dim, which is 64"),
        (V3_2, {"indexer_types": ["full"] * 60}, "indexer_types or .*each of 61 layers"),
        (V3_2, {"index_topk_pattern": "S" + 60 * "F"}, "and 'full' for the first"),
        (V3_2, {"indexer_types": ["half"] * 61}, "indexer_types or .* is .*'half'"),
    ],
)
def test_what_is_not_served_is_named(
    base: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        model_config_of(base | change)


TOPK = 12
TOKENS = random_tokens(40, seed=3)


def save(folder: Path, **config: Any) -> Any:
    return save_deepseek(folder, "DeepseekV32", index_topk=TOPK, **config)


def test_with_as_many_keys_as_positions_attention_is_that_without_an_indexer(
    tmp_path: Path,
) -> None:
    """Bit for bit."""
    folders = tmp_path / "all", tmp_path / "v3"
    save(folders[0])
    shutil.copytree(*folders)
    for folder, newer in zip(
        folders,
        ({"index_topk": 64}, {"architectures": ["DeepseekV3ForCausalLM"], "layer_types": None}),
        strict=True,
    ):
        settings = folder / "config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | newer))
    file = folders[1] / "model.safetensors"
    save_file({n: x for n, x in load_file(file).items() if ".indexer." not in n}, file)
    runners = [PagedRunner(load(folder)) for folder in folders]
    found, expected = (runner.step({0: TOKENS})[0] for runner in runners)
    assert torch.equal(found, expected) and len(runners[0].pools) == 1


# Random weights by a recipe that others can follow; see `golden_glm5`.
GOLDEN: dict[tuple[str, ...], tuple[list[float], list[float], int, float]] = {
    ("full", "full"): (
        [-0.55943, -0.23522, -0.17797, 0.62511],
        [-0.15777, 0.37625, -0.95921, 0.47105, -0.34512, -0.1564],
        *(7, -4.3678),
    ),
    ("full", "shared", "full"): (
        [-1.50126, 0.06763, -0.06325, -0.14698],
        [-1.12111, 0.28642, -0.22632, -0.52774, -0.47713, -0.01467],
        *(14, -0.7566),
    ),
}


def golden_glm5(folder: Path, kinds: tuple[str, ...]) -> None:
    """transformers' tensors in the order of their names, from one generator."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"moe_intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"qk_rope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 8}
    sizes |= {"first_k_dense_replace": 1, "num_hidden_layers": len(kinds)}
    settings = transformers.GlmMoeDsaConfig(**sizes, indexer_types=[*kinds])
    model = transformers.GlmMoeDsaForCausalLM(settings).float()
    generator, tensors = torch.Generator().manual_seed(1234), model.state_dict()
    for name in sorted(tensors):
        noise = 0.2 * torch.randn(tensors[name].shape, generator=generator)
        tensors[name].copy_(noise + name.endswith(("norm.weight", "layernorm.weight")))
    model.save_pretrained(folder)


@pytest.mark.parametrize("kinds", GOLDEN)
def test_glm_5_has_the_logits_of_the_recipe(kinds: tuple[str, ...], tmp_path: Path) -> None:
    golden_glm5(tmp_path, kinds)
    tokens = [1, 5, 9, 13, 2, 7, 11, 3, 8, 4, 6, 10]
    logits = PagedRunner(load(tmp_path)).step({0: tokens})[0]
    first, last, best, total = GOLDEN[kinds]
    assert logits[0, :4].tolist() == pytest.approx(first, abs=1e-4)
    assert logits[-1, :6].tolist() == pytest.approx(last, abs=1e-4)
    assert logits[-1].argmax() == best and float(logits[-1].sum()) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("left_out", [[], ["re:.*indexer.wk"], ["re:.*kv_a_proj_with_mqa"]])
def test_quantised_weights_of_the_indexer_choose_as_their_values_do(
    left_out: list[str], tmp_path: Path
) -> None:
    """Its keys are projected with the latents if both are quantised, or neither."""

    def wants(name: str) -> bool:
        kept = is_projection(name) or name.endswith(("indexer.wq_b.weight", "indexer.wk.weight"))
        return kept and not any(each[5:] in name for each in left_out)

    def change(folder: Path) -> dict[str, torch.Tensor]:
        values = quantise(folder, wants, "deepseek")
        file = folder / "config.json"
        raw = json.loads(file.read_text())
        raw["quantization_config"]["modules_to_not_convert"] = left_out
        file.write_text(json.dumps(raw))
        return values

    own = partial(save, hidden_size=128, q_lora_rank=128)
    paths = quantised_pair(tmp_path, own, change)
    with keeping_fp8():
        models = [load(each, fp8_activations=False) for each in paths]
    check_same_logits(*models, tokens=TOKENS)
    attention: Any = models[0].model.layers[0].self_attn
    assert (attention.indexer.wk is None) == (left_out == [])
    is_quantised = {part: part not in str(left_out) for part in ("wk", "kv_a_proj_with_mqa")}
    slots = weight_table(models[0])
    for part, expected in is_quantised.items():
        [name] = [each for each in slots if ".0." in each and each.endswith(f"{part}.weight")]
        assert slots[name].is_quantised == expected


def test_a_tensor_next_to_the_indexer_and_an_indexer_of_v3_are_surplus(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.index.weight": torch.ones(8)}, file)
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.index\.weight\."):
        load(tmp_path)
    missing = "model.layers.1.self_attn.indexer.k_norm.bias"
    save_file({name: x for name, x in tensors.items() if name != missing}, file)
    with pytest.raises(ValueError, match=rf"missing {re.escape(missing)}"):
        load(tmp_path)
    save_deepseek(tmp_path, "DeepseekV3")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.indexer\."):
        load(tmp_path)


def test_indexers_of_layers_that_share_keys_are_left_out(tmp_path: Path) -> None:
    save_deepseek(tmp_path, "GlmMoeDsa")
    expected = check_same_logits(load(tmp_path), load(tmp_path), tokens=TOKENS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    prefixes = "model.layers.0.self_attn.indexer.", "model.layers.1.self_attn.indexer."
    own = {name: x for name, x in tensors.items() if name.startswith(prefixes[0])}
    save_file(tensors | {name.replace(*prefixes): x.clone() for name, x in own.items()}, file)
    assert torch.equal(PagedRunner(load(tmp_path)).step({0: TOKENS})[0], expected)


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ({}, []),
        ({"indexer_types": None, "index_topk_pattern": "FSSF" + 74 * "S"}, [1, 2, *range(4, 78)]),
        ({"index_topk_freq": 4}, [i for i in range(2, 78) if (i - 1) % 4]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 4}, [*range(4, 78, 2)]),
    ],
)
def test_glm_5_says_which_layers_share_keys(keys: dict[str, Any], shared: list[int]) -> None:
    raw = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"} | keys
    config = model_config_of(raw)
    assert config.indexer is not None and config.indexer.is_interleaved
    assert config.indexer.shared_layers == frozenset(shared)
    assert [group.geometry.num_layers for group in config.layer_groups(SINGLE_RANK)] == [
        *(78, 78 - len(shared))
    ]


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_the_types_of_layers_that_transformers_writes_say_nothing(name: str) -> None:
    assert model_config_of(V3_2 | {"layer_types": [name] * 61}) == model_config_of(V3_2)


def test_the_published_config_is_read() -> None:
    config = model_config_of(V3_2)
    assert config.mla is not None and config.mla.is_interleaved
    assert config.indexer == IndexConfig(2048, 64, 128, is_interleaved=False)
    assert config.quantisation.fp8 is not None and config.num_nextn_layers == 1
    assert config.sparse_layers == frozenset(range(3, 61)) and config.max_positions == 163840
