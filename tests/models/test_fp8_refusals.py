"""Checkpoints that are quantised in ways that are not served."""

import json
from pathlib import Path

import pytest

from tests.models.published import FP8, SCOUT, Raw
from tests.models.published_fp8 import BLOCKS, LLAMA_31_8B, MODELOPT, changed_group, compressed
from tllm_spec.models.registry import model_config, model_config_of


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
