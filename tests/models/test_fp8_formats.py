"""Quantised checkpoints as they are published: which modules have FP8 weights, what their scales
mean, and what is not served."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models.published import FP8, LLAMA_31_8B, SCOUT, V3, Raw
from tests.models.published_fp8 import (
    BLOCK_OF_128,
    BLOCKS,
    BY_TOKEN,
    LLAMA_405B_FP8,
    LLAMA_FP8_DYNAMIC,
    MODELOPT,
    NVIDIA_FP8,
    PUBLISHED_FP8,
    QWEN3_235B_FP8,
    changed_group,
    compressed,
)
from tllm_spec.models.formats.quantisation import PLAIN, ActivationScales, Quantisation, is_left_out
from tllm_spec.models.formats.quantisation_readers import read_quantisation
from tllm_spec.models.registry import model_config, model_config_of

LAYER = "model.layers.5"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LATENT = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj")
EXPERTS = ("mlp.experts.3.gate_proj", "mlp.experts.3.down_proj")


def format_of(quantization: Raw) -> Quantisation:
    """The format that config.json describes."""
    return read_quantisation(None, {"quantization_config": quantization})


def write(folder: Path, raw: Raw, modelopt: Raw | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return folder


@pytest.mark.parametrize("name", PUBLISHED_FP8)
def test_published_checkpoints_are_recognised(name: str, tmp_path: Path) -> None:
    raw, granularity, suffix = PUBLISHED_FP8[name]
    found = model_config(write(tmp_path, raw)).quantisation
    assert found == model_config_of(raw).quantisation
    assert (found.fp8, found.scale_suffix) == (granularity, suffix)
    for module in (*ATTENTION, *LATENT, *EXPERTS, "mlp.gate_proj", "mlp.shared_experts.up_proj"):
        assert found.keeps(f"{LAYER}.{module}"), module
    for module in ("lm_head", "model.embed_tokens", f"{LAYER}.mlp.gate", f"{LAYER}.eh_proj"):
        assert not found.keeps(module), module


def test_metas_405b_has_a_scale_for_each_row_in_all_mlps_but_two(tmp_path: Path) -> None:
    found = model_config(write(tmp_path, LLAMA_405B_FP8)).quantisation
    assert (found.fp8, found.scale_suffix) == ("row", "_scale")
    kept = [f"model.layers.{layer}.mlp.up_proj" for layer in range(126)]
    assert [module for module in kept if found.keeps(module)] == kept[1:-1]
    assert not any(found.keeps(f"{LAYER}.{module}") for module in ATTENTION)


def test_a_checkpoint_without_quantization_has_no_format(tmp_path: Path) -> None:
    assert model_config(write(tmp_path, LLAMA_31_8B)).quantisation == PLAIN
    assert read_quantisation(None, {"quantization_config": None}) == PLAIN


def test_modelopts_file_is_read_and_comes_before_config_json(tmp_path: Path) -> None:
    only_file = model_config(write(tmp_path, LLAMA_31_8B, NVIDIA_FP8)).quantisation
    assert only_file == model_config_of(PUBLISHED_FP8["NVIDIA's Llama-3.1-8B-FP8"][0]).quantisation
    stale = LLAMA_31_8B | {"quantization_config": {"quant_method": "awq"}}
    assert model_config(write(tmp_path, stale, NVIDIA_FP8)).quantisation == only_file


@pytest.mark.parametrize(
    ("algorithm", "granularity"),
    [
        ("FP8", "tensor"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "row"),
        ("FP8_PB_WO", "block"),
        ("fp8_pb_wo", "block"),
        ("FP8_BLOCK_SCALES", "block"),
    ],
)
def test_modelopts_algorithms_say_what_shares_a_scale(algorithm: str, granularity: str) -> None:
    early = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    assert format_of(early).fp8 == granularity
    late = {"quant_method": "modelopt", "quant_algo": algorithm}
    assert format_of(late).fp8 == granularity


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_the_checkpoint_says_how_scales_are_named(
    suffix: str, is_sharded: bool, tmp_path: Path
) -> None:
    # transformers writes a tensor's scale as weight_scale_inv, AutoFP8 as weight_scale.
    name = f"{LAYER}.mlp.up_proj.weight"
    tensors = {name: torch.ones(2, 2).to(torch.float8_e4m3fn), name + suffix: torch.ones(())}
    if is_sharded:
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    for quantization in (FP8, BLOCKS, compressed("block", "float-quantized", **BLOCK_OF_128)):
        raw = LLAMA_31_8B | {"quantization_config": quantization}
        found = model_config(write(tmp_path, raw)).quantisation
        assert found.scale_suffix == suffix


IGNORED: dict[str, tuple[Raw, list[str], list[str]]] = {
    "whole names": (
        BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]},
        ["model.layers.1.mlp.up_proj"],
        ["model.layers.11.mlp.up_proj", "model.layers.1.mlp.up_proj_2"],
    ),
    "AutoFP8's list": (
        FP8 | {"ignored_layers": ["model.layers.0.self_attn.q_proj"]},
        ["model.layers.0.self_attn.q_proj"],
        ["model.layers.0.self_attn.k_proj"],
    ),
    "all below a module": (
        BLOCKS | {"modules_to_not_convert": ["model.layers.1"]},
        ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj"],
        ["model.layers.10.mlp.up_proj"],
    ),
    "the end of a name": (
        BLOCKS | {"modules_to_not_convert": ["self_attn.kv_b_proj"]},
        ["model.layers.4.self_attn.kv_b_proj"],
        ["model.layers.4.self_attn.q_b_proj"],
    ),
    "regular expressions": (
        compressed("channel", "float-quantized") | {"ignore": ["lm_head", r"re:.*q_proj$"]},
        ["model.layers.4.self_attn.q_proj"],
        ["model.layers.4.self_attn.q_proj_2", "model.layers.4.self_attn.k_proj"],
    ),
    "an expression from the start": (
        compressed("channel", "float-quantized") | {"ignore": [r"re:model\.layers\.[01]\."]},
        ["model.layers.1.mlp.up_proj"],
        ["model.layers.2.mlp.up_proj", "x.model.layers.1.mlp.up_proj"],
    ),
    "ModelOpt's wildcards": (
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["model.layers.61.*", "*b_proj"]}}
        | {"quant_method": "modelopt"},
        ["model.layers.61.mlp.up_proj", "model.layers.0.self_attn.kv_b_proj"],
        ["model.layers.6.mlp.up_proj", "model.layers.0.self_attn.q_a_proj"],
    ),
    "all but the targets": (
        changed_group(targets=[r"re:.*mlp.*", "model.layers.1.self_attn.o_proj"])
        | {"ignore": ["re:.*down_proj"]},
        ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
        ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj"],
    ),
    "none but the ignored": (
        changed_group(targets=["re:.*mlp.*", "Linear"]),
        ["lm_head"],
        ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"],
    ),
    "all below a wildcard": (
        BLOCKS | {"modules_to_not_convert": ["model.layers.*.self_attn"]},
        ["model.layers.7.self_attn.q_proj"],
        ["model.layers.7.mlp.up_proj", "model.layers.7.self_attn_2.q_proj"],
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_ignored_modules_keep_16_bits(name: str) -> None:
    quantization, ignored, kept = IGNORED[name]
    found = format_of(quantization)
    assert [module for module in ignored if found.keeps(module)] == []
    assert [module for module in kept if not found.keeps(module)] == []


CACHE_ONLY = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


@pytest.mark.parametrize(
    "cache_only",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        CACHE_ONLY,
        CACHE_ONLY | {"config_groups": {}},
    ],
)
def test_a_checkpoint_with_a_quantised_cache_only_has_no_fp8_weights(cache_only: Raw) -> None:
    found = format_of(cache_only)
    assert is_left_out(f"{LAYER}.self_attn.k_proj.k_scale")
    assert not any(found.keeps(f"{LAYER}.{module}") for module in ATTENTION)


GROUP, NO_GROUP = ("input_activations of config_groups", "activations are not quantised (W8A16)")
TOKENS, BLOCK_SCALES, STATIC = map(ActivationScales, ("token", "block", "tensor"))


@pytest.mark.parametrize(
    ("quantization", "unused"),
    [
        (BLOCKS, []),
        (BLOCKS | {"kv_cache_scheme": None, "activation_scheme": "dynamic"}, []),
        (FP8 | {"activation_scheme": "static", "kv_cache_scheme": "static"}, []),
        (CACHE_ONLY, []),
        (compressed("tensor", "float-quantized"), []),
        (changed_group(input_activations={"dynamic": True}), [(GROUP, NO_GROUP)]),
        (changed_group(input_activations=None), []),
        (NVIDIA_FP8 | MODELOPT, []),
        (MODELOPT | {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": "NONE"}, []),
        (LLAMA_405B_FP8["quantization_config"], []),
    ],
)
def test_what_is_not_used_is_said_with_the_reason(
    quantization: Raw, unused: list[tuple[str, str]]
) -> None:
    expected = tuple(f"{name} is not used: {reason}" for name, reason in unused)
    assert format_of(quantization).unused == expected


@pytest.mark.parametrize(
    ("quantization", "activations"),
    [
        (LLAMA_405B_FP8["quantization_config"], ActivationScales("token", 1200.0)),
        ({"quant_method": "fbgemm_fp8"}, TOKENS),
        (LLAMA_FP8_DYNAMIC["quantization_config"], TOKENS),
        (changed_group(input_activations=BY_TOKEN), TOKENS),
        (MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, TOKENS),
        (MODELOPT | {"quant_algo": "FP8"}, STATIC),
        (MODELOPT | {"quant_algo": "FP8_PB_WO"}, None),
        (MODELOPT | {"quant_algo": "FP8_BLOCK_SCALES"}, BLOCK_SCALES),
        (compressed("tensor", "float-quantized"), STATIC),
        (changed_group(input_activations=BY_TOKEN | {"dynamic": False}), None),
        # One scale for all tokens of a batch would let requests change each other's text.
        (changed_group(input_activations=BY_TOKEN | {"strategy": "tensor"}), TOKENS),
        (changed_group(input_activations=BY_TOKEN | {"num_bits": 4}), None),
        (changed_group(input_activations=BY_TOKEN | {"strategy": "group"}), None),
        (
            changed_group(input_activations=BY_TOKEN | {"strategy": "group", "group_size": 128}),
            BLOCK_SCALES,
        ),
        (changed_group(input_activations=None), None),
        (FP8, TOKENS),
        (FP8 | {"activation_scheme": "static"}, STATIC),
        (BLOCKS, BLOCK_SCALES),
    ],
)
def test_the_configuration_says_how_activations_are_quantised(
    quantization: Raw, activations: ActivationScales | None
) -> None:
    assert format_of(quantization).activations == activations


def test_routers_have_16_bits_whether_they_are_listed_or_not() -> None:
    found = format_of(BLOCKS)
    routers = ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "feed_forward.router")
    assert not any(found.keeps(f"{LAYER}.{router}") for router in routers)


def test_scales_of_activations_and_of_the_cache_are_left_out() -> None:
    # Of AutoFP8, compressed-tensors, ModelOpt and transformers.
    unused = (
        *("mlp.up_proj.input_scale", "self_attn.k_scale", "self_attn.kv_scale"),
        *("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.q_scale"),
        *("self_attn.k_proj.output_scale", "mlp.up_proj.activation_scale"),
    )
    assert all(is_left_out(f"{LAYER}.{name}") for name in unused)
    used = ("weight", "weight_scale", "weight_scale_inv", "bias")
    assert not any(is_left_out(f"{LAYER}.mlp.up_proj.{name}") for name in used)


ONE, ROWS = torch.tensor(0.5), torch.tensor([[2.0], [4.0], [8.0]])
TILES = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
CASES: dict[str, tuple[Raw, torch.Tensor, int, list[list[float]]]] = {
    "a tensor": (FP8, ONE, 3, [[0.5, 0.5]] * 3),
    "a tensor, [1]": (FP8, ONE.view(1).bfloat16(), 3, [[0.5, 0.5]] * 3),
    "compressed tensor": (compressed("tensor", "float-quantized"), ONE, 2, [[0.5, 0.5]] * 2),
    "rows": (compressed("channel", "float-quantized"), ROWS, 3, [[2, 2], [4, 4], [8, 8]]),
    "rows, [N]": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        ROWS.flatten(),
        3,
        [[2, 2], [4, 4], [8, 8]],
    ),
    "Meta's rows": ({"quant_method": "fbgemm_fp8"}, ROWS, 3, [[2, 2], [4, 4], [8, 8]]),
    "blocks": (BLOCKS, TILES, 130, [[1, 2]] * 128 + [[4, 8]] * 2),
    "blocks in bf16": (BLOCKS, TILES.bfloat16(), 129, [[1, 2]] * 128 + [[4, 8]]),
    "blocks in E8M0": (BLOCKS, TILES.to(torch.float8_e8m0fnu), 129, [[1, 2]] * 128 + [[4, 8]]),
    "compressed blocks": (
        compressed("block", "float-quantized", **BLOCK_OF_128),
        TILES,
        256,
        [[1, 2]] * 128 + [[4, 8]] * 128,
    ),
    "ModelOpt's blocks": (
        MODELOPT | {"quant_algo": "FP8_PB_WO"},
        TILES.view(2, 1, 2, 1),
        130,
        [[1, 2]] * 128 + [[4, 8]] * 2,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("columns", [129, 256])
def test_each_row_and_128_inputs_get_the_scale_that_multiplies_them(
    name: str, columns: int
) -> None:
    quantization, scale, rows, expected = CASES[name]
    scales = format_of(quantization).row_scales(scale, (rows, columns), "w")
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.tolist() == expected


def test_a_dequantised_weight_is_the_value_times_the_scale() -> None:
    # 1.5 and 448 are E4M3 values; quantised with the factor 4, whose inverse is stored.
    weight = torch.tensor([[1.5, -448.0]]).to(torch.float8_e4m3fn)
    scales = format_of(BLOCKS).row_scales(torch.tensor([[0.25]]), (1, 2), "w")
    assert (weight.float() * scales).tolist() == [[0.375, -112.0]]


@pytest.mark.parametrize(
    ("quantization", "scale", "problem"),
    [
        (
            BLOCKS,
            torch.ones(3, 1),
            r"up\.weight_scale_inv is torch.float32 of .*\[3, 1\].* \[3, 2\]",
        ),
        (BLOCKS, torch.ones(2, 3), r"\[2, 3\]; with a scale for each block"),
        (BLOCKS, torch.ones(3, 2, dtype=torch.uint8), "is torch.uint8 of .* floating-point"),
        (
            FP8,
            torch.ones(2),
            r"up\.weight_scale is .*\[2\].* a weight of \[300, 200\] needs .*\[\]",
        ),
        (
            compressed("channel", "float-quantized"),
            torch.ones(1, 300),
            r"\[1, 300\].*each row.*\[300, 1\]",
        ),
    ],
)
def test_a_scale_of_a_wrong_shape_is_named(
    quantization: Raw, scale: torch.Tensor, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        format_of(quantization).row_scales(scale, (300, 200), "up.weight")


def test_the_key_of_early_compressed_tensors_is_read() -> None:
    quantization = LLAMA_FP8_DYNAMIC["quantization_config"]
    found = read_quantisation(None, LLAMA_31_8B | {"compression_config": quantization})
    assert found == format_of(quantization)


def test_powers_of_2_as_scales_are_served() -> None:
    later = V3 | {"quantization_config": BLOCKS | {"scale_fmt": "ue8m0"}}  # DeepSeek V3.1
    assert model_config_of(later).quantisation == model_config_of(V3).quantisation


def test_listed_routers_are_found_among_hundreds_of_entries() -> None:
    found = format_of(QWEN3_235B_FP8["quantization_config"])
    assert len(found.ignored.names) == 1 + 3 * 94 and not found.ignored.patterns
    assert not found.keeps("model.layers.93.post_attention_layernorm")


def two_groups() -> Raw:
    config = compressed("tensor", "float-quantized")
    return config | {"config_groups": dict.fromkeys("ab", config["config_groups"]["group_0"])}


REFUSED: dict[str, tuple[Raw | str, list[str]]] = {
    "AutoRound": ({"quant_method": "auto-round", "bits": 4}, ["quant_method is 'auto-round'"]),
    "no method": ({"bits": 8}, ["quant_method is None"]),
    "other blocks": (FP8 | {"weight_block_size": [64, 64]}, [r"weight_block_size is \[64, 64\]"]),
    "E5M2": (FP8 | {"fmt": "e5m2"}, ["fmt is 'e5m2' .served: 'e4m3' or None"]),
    "FP4 experts": (BLOCKS | {"expert_dtype": "fp4"}, ["expert_dtype is 'fp4'"]),
    "FP8 embeddings": (
        BLOCKS | {"modules_to_convert": ["model.embed_tokens"]},
        [r"modules_to_convert is \['model"],
    ),
    "INT4 that is not packed": (
        compressed("group", "int-quantized", type="int", num_bits=4, group_size=128),
        ["format is 'int-quantized'", "type is 'int'", "num_bits is 4", "strategy is 'group'"],
    ),
    "INT8": (
        compressed("channel", "int-quantized", type="int", symmetric=False),
        ["format is 'int-quantized'", "type is 'int'", "symmetric is False"],
    ),
    "compressed blocks of another size": (
        compressed("block", "float-quantized", block_structure=[64, 128]),
        [r"block_structure is \[64, 128\]"],
    ),
    "other targets": (changed_group(targets=["Embedding"]), [r"targets is \['Embedding'\]"]),
    "a class among the targets": (
        changed_group(targets=["re:.*mlp.*", "Embedding"]),
        [r"targets is \['re:.*', 'Embedding'\] .served: 'Linear'"],
    ),
    "no targets": (changed_group(targets=[]), [r"targets is \[\]"]),
    "a broken target": (
        changed_group(targets=["re:(gate"]),
        [r"'re:\(gate' among the targets is no regular expression"],
    ),
    "a group in another format": (
        changed_group(format="int-quantized"),
        ["format is 'int-quantized'"],
    ),
    "weights that are not stored in FP8": (
        compressed("tensor", "float-quantized", dynamic=True),
        ["dynamic is True"],
    ),
    "mixed groups": (two_groups(), ["config_groups has 2 groups"]),
    "no groups": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        ["config_groups has 0 groups .served: 1.. Of"],
    ),
    "a text": ("fp8", ["quantization_config of config.json is 'fp8'; it must be an object"]),
    "a name instead of names": (
        FP8 | {"ignored_layers": "lm_head"},
        ["ignored_layers is 'lm_head' .it must be a list of names"],
    ),
    "numbers instead of names": (
        BLOCKS | {"modules_to_not_convert": [0]},
        [r"modules_to_not_convert is \[0\] .it must be a list of names"],
    ),
    "a list of groups": (
        compressed("tensor", "float-quantized") | {"config_groups": [1]},
        [r"config_groups is \[1\] .it must be an object"],
    ),
    "texts instead of objects": (
        compressed("tensor", "float-quantized")
        | {"config_groups": {"a": "FP8", "b": {"weights": "FP8", "targets": "Linear"}}},
        [
            r"config_groups\.a is 'FP8' .it must be an object",
            r"config_groups\.b\.weights is 'FP8' .it must be an object",
            r"config_groups\.b\.targets is 'Linear' .it must be a list",
        ],
    ),
    "a producer's name": (MODELOPT | {"quant_method": None, "producer": "modelopt"}, ["is None"]),
    "sparse weights": (
        compressed("tensor", "float-quantized") | {"sparsity_config": {"format": "sparse-bitmask"}},
        ["sparsity_config: format is 'sparse-bitmask'"],
    ),
    "transforms": (
        compressed("tensor", "float-quantized") | {"transform_config": {"config_groups": {"u": 1}}},
        ["transform_config is"],
    ),
    "a broken expression": (
        compressed("tensor", "float-quantized") | {"ignore": ["re:(gate"]},
        [r"'re:\(gate' among the ignored modules is no regular expression"],
    ),
    "NVFP4 with scaled inputs": (
        MODELOPT | {"quant_algo": "NVFP4_AWQ", "pre_quant_scale": True},
        ["quant_algo is 'NVFP4_AWQ'", "pre_quant_scale is True"],
    ),
    "mixed precision": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
        ["quant_algo is 'MIXED_PRECISION'", "quantized_layers is {'a': {}}"],
    ),
    "ModelOpt's blocks of another size": (
        MODELOPT | {"quant_algo": "FP8_PB_WO", "group_size": 64},
        ["group_size is 64"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_all_reasons_and_what_is_served(name: str) -> None:
    quantization, reasons = REFUSED[name]
    served = ["config.json", r"FP8 \(E4M3\).*quant_method 'fp8'", "are not served"]
    for problem in (*reasons, *served):
        with pytest.raises(ValueError, match=problem):
            model_config_of(LLAMA_31_8B | {"quantization_config": quantization})


def test_the_refusal_of_modelopts_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    quantization = {"quantization": {"quant_algo": "W4A8_AWQ"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quant_algo is 'W4A8_AWQ'"):
        model_config(tmp_path)


def test_llama_4_in_fp8_is_refused() -> None:
    with pytest.raises(
        ValueError, match="quantised weights; it is served with weights of 16 or 32 bits"
    ):
        model_config_of(SCOUT | {"quantization_config": BLOCKS})
