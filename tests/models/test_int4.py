"""Weights that a checkpoint has in 4 bits stay so: with the logits of their dequantised values, and
with the codes and scales that the producers' own code makes."""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import keeping_int4
from tests.models.helpers import (
    CPU,
    PagedRunner,
    check_same_logits,
    load,
    quantised_pair,
    random_tokens,
    save_checkpoint,
)
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.formats.four_bit import FourBitSlot
from tllm_spec.models.formats.four_bit_packings import PACKINGS, FourBitTensor
from tllm_spec.models.formats.quantisation import FourBitGroups, Quantisation
from tllm_spec.models.layers import Placement
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import check_shards, model_type
from tllm_spec.models.weights import weight_table
from tllm_spec.zoo.quantise import Style, awq_words, is_projection, quantise, words

TOKENS = random_tokens(20)
CASES = (
    Style("awq"),
    Style("awq", 64, symmetric=True),
    Style("awq", 0),
    Style("gptq", 64),
    Style("gptq", 128, symmetric=True),
    Style("gptq", 0),
    Style("gptq_v2"),
    Style("gptq", is_ordered=True),
    Style("compressed", symmetric=True),
    Style("compressed", 128),
    Style("compressed", 0),
    Style("compressed", is_ordered=True),
    Style("mxfp4"),
    Style("nvfp4"),
)
# Groups of 128 of which the last is short, and blocks that are.
SIZES = {"hidden_size": 128, "intermediate_size": 160}


@pytest.fixture(autouse=True)
def int4_on_cpu() -> Iterator[Mock]:
    with keeping_int4() as asked:
        yield asked


def save(
    folder: Path, case: Style, sizes: dict[str, int] = SIZES, **config: Any
) -> tuple[Path, Path]:
    """A Llama in 4 bits, and the same values in float32."""
    own = partial(save_checkpoint, architecture="Llama", **sizes, **config)
    return quantised_pair(folder, own, partial(quantise, style=case))


def int4_names(model: CausalLM) -> set[str]:
    return {name for name, slot in weight_table(model).items() if isinstance(slot, FourBitSlot)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_4_bit_checkpoint_gives_the_logits_of_its_dequantised_weights(
    case: Style, tmp_path: Path
) -> None:
    size = 256 if case.group == 128 else 160
    sizes = {"hidden_size": 128, "intermediate_size": size if case.group != 64 else 192}
    models = [load(path) for path in save(tmp_path, case, sizes, attention_bias=True)]
    assert check_same_logits(*models, tokens=TOKENS).std() > 0.3
    assert int4_names(models[0]) == {
        name for name in weight_table(models[0]) if is_projection(name)
    }
    for path, module in models[1].named_modules():
        if isinstance(module, Linear):
            own = models[0].get_submodule(path)
            assert isinstance(own, Linear) and torch.equal(own.full_weight(), module.weight)
    kept = [p for name, p in models[0].named_parameters() if "_proj.weight" in name]
    num_weights = sum(
        slot.shape[0] * slot.shape[1]
        for name, slot in weight_table(models[0]).items()
        if is_projection(name)
    )
    assert sum(each.nbytes for each in kept) < 0.95 * num_weights  # float32 takes 4 bytes


@pytest.mark.parametrize("case", CASES[:8:7], ids=str)
def test_a_cpu_dequantises_at_load(case: Style, tmp_path: Path, int4_on_cpu: Mock) -> None:
    int4_on_cpu.side_effect = lambda device: False
    found, expected = (dict(load(path).named_parameters()) for path in save(tmp_path, case))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("packing", ["gptq", "compressed"])
def test_layers_that_the_checkpoint_leaves_out_keep_their_weights(
    packing: str, tmp_path: Path
) -> None:
    """Also a part of a fused layer, whose other parts are then dequantised, and an output layer in
    4 bits."""

    def wants(name: str) -> bool:
        left_out = name.endswith(
            ("layers.1.self_attn.v_proj.weight", "layers.0.mlp.down_proj.weight")
        )
        return (is_projection(name) or name == "lm_head.weight") and not left_out

    own = partial(save_checkpoint, architecture="Llama", **SIZES)
    change = partial(quantise, style=Style(packing), wants=wants)
    models = [load(path) for path in quantised_pair(tmp_path, own, change)]
    check_same_logits(*models, tokens=TOKENS)
    dequantised = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"}
    names = {name for name in weight_table(models[0]) if is_projection(name)}
    assert int4_names(models[0]) == names - dequantised - {"model.layers.0.mlp.down_proj.weight"}


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        ("DeepseekV2", Style("awq", 0)),
        ("Qwen3Moe", Style("gptq")),
        ("Qwen3Moe", Style("mxfp4")),
        ("Qwen3Moe", Style("nvfp4")),
        ("Qwen3Moe", Style("compressed")),
    ],
    ids=str,
)
def test_experts_keep_4_bits_and_latents_are_dequantised(
    architecture: str, case: Style, tmp_path: Path
) -> None:
    found = load(save_experts(tmp_path, case, architecture))
    names = {name for name in weight_table(found) if is_projection(name)}
    assert int4_names(found) == {name for name in names if "kv_b_proj" not in name}
    assert any(".mlp.experts." in name for name in names)
    check_same_logits(found, load(tmp_path / "plain"), tokens=TOKENS)


def test_experts_with_an_order_of_inputs_are_dequantised(tmp_path: Path) -> None:
    found = load(save_experts(tmp_path, Style("gptq", is_ordered=True), "Qwen3Moe"))
    assert not any(".experts." in name for name in int4_names(found))
    check_same_logits(found, load(tmp_path / "plain"), tokens=TOKENS)


def save_experts(folder: Path, case: Style, architecture: str) -> Path:
    """A model with experts in 4 bits, next to the same values in `folder / "plain"`."""
    if architecture == "Qwen3Moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        own = partial(save_checkpoint, architecture=architecture, hidden_size=64, **experts)
    else:
        own = partial(save_deepseek, architecture=architecture)
    return quantised_pair(folder, own, partial(quantise, style=case))[0]


def test_dummy_weights_have_the_size_of_others(tmp_path: Path) -> None:
    path, _ = save(tmp_path, Style("gptq", 32, is_ordered=True))
    check_dummy(load(path, load_format="dummy"))
    path, _ = save(tmp_path / "mxfp4", Style("mxfp4"))
    check_dummy(load(path, load_format="dummy"))


def check_dummy(model: CausalLM) -> None:
    weight = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(weight, Linear)
    assert 0.5 < weight.full_weight().std() * 160**0.5 < 1.5  # powers of two are coarse
    assert PagedRunner(model).step({0: TOKENS})[0].isfinite().all()


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[8], CASES[10]], ids=str)
def test_ranks_have_whole_groups_of_codes_scales_and_zero_points(
    case: Style, tmp_path: Path
) -> None:
    path, _ = save(tmp_path, case, {"hidden_size": 128, "intermediate_size": 192})
    whole = load(path)
    layers = {name: each for name, each in whole.named_modules() if isinstance(each, Linear)}
    for rank in range(2):
        placement = Placement(
            torch.float32,
            CPU,
            Mapping(rank, 2, 2, 1),
            quantised=Quantisation(four_bit=FourBitGroups(case.group)),
        )
        model = model_type(whole.config)(whole.config, 64, placement)
        stored = dict(
            whole.stored_tensors(path, whole.config, lambda name: not whole.ignores(name))
        )
        for name, slot in weight_table(model).items():
            slot.load(stored[name])
        for name, layer in model.named_modules():
            if isinstance(layer, RowLinear):
                size = layer.weight_format.shape[1]
                expected = layers[name].full_weight()[:, rank * size : (rank + 1) * size]
                assert torch.equal(layer.full_weight(), expected)
            elif isinstance(layer, ColumnLinear) and name != "lm_head":
                full, own = layers[name], []
                assert isinstance(full, ColumnLinear)
                parts = full.full_weight().split(list(full.parts.values()))
                own = torch.cat([part.chunk(2)[rank] for part in parts])
                assert torch.equal(layer.full_weight(), own)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Style("awq", 32), "96 inputs in groups of 32, .* with 1, 3 devices"),
        (Style("gptq", 32, is_ordered=True), "desc_act .actorder. .* served on one device"),
    ],
)
def test_slices_that_cut_a_group_are_refused_with_the_sizes_that_work(
    case: Style, message: str, tmp_path: Path
) -> None:
    path, _ = save(tmp_path, case, {"hidden_size": 64, "intermediate_size": 96})
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2; .*{message}"):
        check_shards(path, 2, 1)
    check_shards(path, 1, 1)


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (Style("awq"), {"scales": None}, f"has no {Q_PROJ}.scales for {Q_PROJ}.qweight"),
        (Style("awq"), {"qweight": None}, f"next to no qweight: {Q_PROJ}.qzeros, {Q_PROJ}.scales"),
        (Style("awq"), {"scales": torch.ones(2, 128)}, f"scales of {Q_PROJ} are .128, 2."),
        (Style("awq"), {"qzeros": torch.ones(4, 16)}, f"{Q_PROJ}.qzeros is torch.float32"),
        (
            Style("gptq"),
            {"g_idx": torch.arange(128).int() % 4},
            f"g_idx of {Q_PROJ} has other groups",
        ),
        (
            Style("gptq", is_ordered=True),
            {"g_idx": torch.zeros(128).int()},
            f"g_idx of {Q_PROJ} does not have 32 inputs in each group",
        ),
        (
            Style("gptq", is_ordered=True),
            {"g_idx": torch.arange(128).int() % 4},
            "g_idx of model.layers.0.self_attn.._proj is not that of the layers",
        ),
        (Style("awq"), {"other": torch.ones(1)}, f"surplus {Q_PROJ}.other"),
        (Style("awq"), {"qzeros": None}, f"has no {Q_PROJ}.qzeros for {Q_PROJ}.qweight"),
        (Style("gptq"), {"qzeros": None}, f"has no {Q_PROJ}.qzeros for"),
        (Style("compressed"), {"weight_zero_point": None}, f"no {Q_PROJ}.weight_zero_point for"),
        (Style("gptq", is_ordered=True), {"g_idx": None}, f"has no {Q_PROJ}.g_idx for"),
    ],
    ids=(
        "no scales",
        "no codes",
        "other groups",
        "no words",
        "an order without desc_act",
        "uneven groups",
        "two orders",
        "an unknown tensor",
        "no zero points of AWQ",
        "no zero points of GPTQ",
        "no zero points of compressed-tensors",
        "no order of groups",
    ),
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    case: Style, changed: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    path, _ = save(tmp_path, case)
    tensors = load_file(path / "model.safetensors")
    for kind, tensor in changed.items():
        tensors.pop(f"{Q_PROJ}.{kind}", None)
        if tensor is not None:
            tensors[f"{Q_PROJ}.{kind}"] = tensor
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ of 8 bits": (Style("awq").quantization | {"bits": 8}, "bits is 8 .served: 4"),
    "GPTQ of 3 bits": (Style("gptq").quantization | {"bits": 3}, "bits is 3 .served: 4"),
    "another layout": (Style("awq").quantization | {"version": "gemv"}, "version is 'gemv'"),
    "Marlin": (Style("gptq").quantization | {"checkpoint_format": "marlin"}, "format is 'marlin'"),
    "groups of 16": (
        Style("gptq").quantization | {"group_size": 16},
        "group_size is 16 .served: 32, 64, 128 or -1",
    ),
    "MXFP4 in other groups": (Style("mxfp4", 64).quantization, "group_size is 64 .served: 32"),
    "NVFP4 in other groups": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size is 32 .served: 16",
    ),
    "settings of single modules": (
        Style("gptq").quantization | {"dynamic": {"+:.*mlp.*": {"bits": 8}}},
        r"dynamic has other settings for '\+:",
    ),
}
PACKED = Style("compressed").quantization
for name, own, text in (
    ("8 bits", {"num_bits": 8}, "num_bits is 8 .served: 4"),
    ("floats", {"type": "float"}, "type is 'float'"),
    ("a scale for a tensor", {"strategy": "tensor"}, "strategy is 'tensor'"),
):
    group = PACKED["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | own}
    REFUSED[name] = (PACKED | {"config_groups": {"group_0": changed}}, text)
quantised = group | {"input_activations": {"num_bits": 8}}
REFUSED["W4A8"] = (PACKED | {"config_groups": {"group_0": quantised}}, "input_activations is")


@pytest.mark.parametrize("name", REFUSED)
def test_other_checkpoints_of_these_methods_are_refused_by_name(name: str, tmp_path: Path) -> None:
    quantization, message = REFUSED[name]
    path, _ = save(tmp_path, Style("awq"))
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match=f"{message}.*other quantized checkpoints are not served"):
        load(path)


def test_old_gptq_repositories_describe_the_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    path, plain = save(tmp_path, Style("gptq", 64))
    raw = json.loads((path / "config.json").read_text())
    settings = raw.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(raw))
    del settings["quant_method"], settings["checkpoint_format"]
    (path / "quantize_config.json").write_text(json.dumps(settings))
    found = load(path)
    check_same_logits(found, load(plain), tokens=TOKENS)
    assert int4_names(found)


# 8 numbers and the word that the producers' own code packs them into.
NUMBERS = torch.tensor([[3, 7, 8, 15, 0, 1, 12, 9]])


def test_words_are_those_of_the_producers() -> None:
    assert awq_words(NUMBERS).item() == -1846034301
    assert words(NUMBERS).item() == -1676609421
    word = torch.tensor([[-1846034301]], dtype=torch.int32)
    tensors = {"qweight": word, "scales": torch.ones(1, 8)}
    assert PACKINGS["awq"].unpack(tensors).codes.t().tolist() == NUMBERS.tolist()
    word = torch.tensor([[-1676609421]], dtype=torch.int32)
    tensors = {"qweight": word, "scales": torch.ones(1, 1)}
    for packing, zero_words in (("gptq", 2004318071), ("gptq_v2", -2004318072)):
        zeros = torch.tensor([[zero_words]], dtype=torch.int32)
        found = PACKINGS[packing].unpack(tensors | {"qzeros": zeros})
        assert found.codes.tolist() == NUMBERS.tolist()
        assert found.zeros is not None and found.zeros.t().tolist() == [[8] * 8]
    found = PACKINGS["compressed"].unpack({"weight_packed": word, "weight_scale": torch.ones(1, 1)})
    assert (found.codes.int() - 8).tolist() == [[-5, -1, 0, 7, -8, -7, 4, 1]]


@pytest.mark.parametrize("is_modelopt", [False, True])
def test_e2m1_numbers_have_the_values_of_the_producers(is_modelopt: bool) -> None:
    """NVFP4 of both producers, and MXFP4."""
    stored = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0, 0, 0]], dtype=torch.uint8)
    scale = torch.tensor([[0x44]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"weight_scale": scale}
    if is_modelopt:
        tensors |= {"weight": stored, "weight_scale_2": torch.tensor(0.01)}
    else:
        tensors |= {"weight_packed": stored, "weight_global_scale": torch.tensor([100.0])}
    found = PACKINGS["modelopt" if is_modelopt else "nvfp4"].unpack(tensors)
    values = FourBitTensor(found.codes, found.scales, 16).dequantised(torch.float32)
    expected = [0, 0.015, 0.03, 0.045, 0.06, 0.09, 0.12, 0.18, 0, -0.015]
    torch.testing.assert_close(values[0, :10], torch.tensor(expected))
    pairs = torch.tensor([[0xA0, 0xA1, 0xA2, 0xA3] * 4], dtype=torch.uint8)
    exponent = torch.tensor([[125]], dtype=torch.uint8)
    found = PACKINGS["mxfp4"].unpack({"weight_packed": pairs, "weight_scale": exponent})
    values = FourBitTensor(found.codes, found.scales, 32).dequantised(torch.float32)
    expected = [0, -0.25, 0.125, -0.25, 0.25, -0.25, 0.375, -0.25]
    assert torch.equal(values[0, :8], torch.tensor(expected))


@pytest.mark.parametrize("in_own_file", [False, True])
def test_modelopts_nvfp4_has_other_names_and_a_factor_of_scales(
    in_own_file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = save(tmp_path, Style("nvfp4"))
    with keeping_int4():
        expected = load(path)
    tensors = load_file(path / "model.safetensors")
    for name in [each for each in tensors if each.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        tensors[f"{module}.weight"] = tensors.pop(name)
        divisor = tensors.pop(f"{module}.weight_global_scale")
        tensors[f"{module}.weight_scale_2"] = 1 / divisor[0]
        tensors[f"{module}.input_scale"] = torch.tensor(0.01)
    save_file(tensors, path / "model.safetensors")
    settings: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}
    raw = json.loads((path / "config.json").read_text())
    if in_own_file:
        own = {"producer": {"name": "modelopt"}, "quantization": settings}
        (path / "hf_quant_config.json").write_text(json.dumps(own))
        del raw["quantization_config"]
    else:
        raw["quantization_config"] = settings | {"quant_method": "modelopt"}
    (path / "config.json").write_text(json.dumps(raw))
    with keeping_int4(), caplog.at_level(logging.INFO):
        found = load(path)
    assert "activations of NVFP4 are not quantised (W4A16)" in caplog.text
    assert int4_names(found) == int4_names(expected)
    check_same_logits(found, expected, tokens=TOKENS)


# What is declared, the stored numbers of the groups in turn, and what the checkpoint must equal:
# the folder whose zero points are 8, or None, where qzeros are refused.
ZERO_POINTS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "v1": ({"checkpoint_format": "gptq", "sym": True}, (7,), True),
    "v1 with the zeros of v2": ({"checkpoint_format": "gptq", "sym": True}, (8,), True),
    "no version": ({"sym": True}, (7,), True),
    "no version with the zeros of v2": ({"sym": True}, (8,), True),
    "v2": ({"checkpoint_format": "gptq_v2", "sym": True}, (8,), True),
    "v2 with the zeros of v1": ({"checkpoint_format": "gptq_v2", "sym": True}, (7,), True),
    "nothing about symmetry": ({"checkpoint_format": "gptq"}, (8,), True),
    "both versions": ({"checkpoint_format": "gptq", "sym": True}, (7, 8), False),
    "zero points of 10": ({"checkpoint_format": "gptq", "sym": True}, (9,), False),
}


def with_zeros(folder: Path, settings: dict[str, Any], numbers: tuple[int, ...]) -> None:
    """Writes these zero points, in turn for the modules, and settings over those of a folder."""
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate(each for each in sorted(tensors) if each.endswith("qzeros")):
        number = numbers[index % len(numbers)]
        tensors[name] = words(torch.full((len(tensors[name]), 8 * tensors[name].shape[1]), number))
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    own = {"quant_method": "gptq", "bits": 4, "group_size": 32} | settings
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": own}))


@pytest.mark.parametrize("name", ZERO_POINTS)
def test_symmetric_gptq_has_the_zero_point_8_in_either_version_or_is_refused(
    name: str, tmp_path: Path
) -> None:
    settings, numbers, is_served = ZERO_POINTS[name]
    path, plain = save(tmp_path, Style("gptq", symmetric=True))
    with_zeros(path, settings, numbers)
    if not is_served:
        with pytest.raises(
            ValueError, match=rf"qzeros hold {', '.join(map(str, numbers))}, .*7 or 8"
        ):
            load(path)
        return
    check_same_logits(load(path), load(plain), tokens=TOKENS)


@pytest.mark.parametrize(("version", "shift"), [("gptq", 1), ("gptq_v2", 0)])
def test_asymmetric_gptq_follows_the_declared_version(
    version: str, shift: int, tmp_path: Path, int4_on_cpu: Mock
) -> None:
    """Also where all zero points are one number."""
    int4_on_cpu.side_effect = lambda device: False
    path, plain = save(tmp_path, Style("gptq", symmetric=True))
    with_zeros(path, {"checkpoint_format": version, "sym": False}, (8 - shift,))
    check_same_logits(load(path), load(plain), tokens=TOKENS)
    with_zeros(path, {"checkpoint_format": version, "sym": False}, (9 - shift,))
    name = "model.layers.0.mlp.down_proj.weight"
    shifted, eights = (dict(load(each).named_parameters())[name] for each in (path, plain))
    assert not torch.allclose(shifted, eights, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_surplus_bias_is_left_out_if_it_is_zero_and_named_if_not(
    value: float, tmp_path: Path
) -> None:
    path, plain = save(tmp_path, Style("gptq"))
    tensors = load_file(path / "model.safetensors")
    for name in [each for each in tensors if each.endswith("scales")]:
        tensors[name.replace("scales", "bias")] = torch.full(
            (tensors[name].shape[1],), value
        ).half()
    save_file(tensors, path / "model.safetensors")
    if value:
        with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.mlp\.down_proj\.bias"):
            load(path)
        return
    check_same_logits(load(path), load(plain), tokens=TOKENS)
