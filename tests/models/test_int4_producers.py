"""Codes and scales of 4 bits are those that the producers' own code makes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.fp8_checkpoint import keeping_int4
from tests.models.helpers import load
from tests.models.test_int4 import check_same_logits, int4_names, save
from tllm_spec.models.formats.four_bit_packings import PACKINGS, FourBitTensor
from tllm_spec.zoo.quantise import Style, awq_words, words

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
        found = PACKINGS[packing].unpack(tensors | {"qzeros": zeros})  # type: ignore[index]  # a name
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
    check_same_logits(found, expected)


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
    check_same_logits(*(load(each) for each in (path, plain)))


@pytest.mark.parametrize(("version", "shift"), [("gptq", 1), ("gptq_v2", 0)])
def test_asymmetric_gptq_follows_the_declared_version(
    version: str, shift: int, tmp_path: Path
) -> None:
    """Also where all zero points are one number."""
    path, plain = save(tmp_path, Style("gptq", symmetric=True))
    with_zeros(path, {"checkpoint_format": version, "sym": False}, (8 - shift,))
    check_same_logits(*(load(each) for each in (path, plain)))
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
    check_same_logits(*(load(each) for each in (path, plain)))
