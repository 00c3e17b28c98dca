"""The log says once a model which FP8 weights are dequantised at load, why, and what they take."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.fp8_checkpoint import compressed, is_projection, keeping_fp8, quantise
from tests.models.helpers import CPU, PagedRunner, load, random_tokens
from tests.models.mtp_reference import export_modules, save_with_mtp
from tests.models.test_fp8 import FAMILIES, fp8_names, save_both
from tests.models.test_fp8_formats import GROUP, NO_GROUP
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.formats.quantisation import Quantisation
from tllm_spec.models.formats.quantised_layers import prepare_quantised
from tllm_spec.models.layers import Placement
from tllm_spec.models.mtp import load_nextn
from tllm_spec.models.registry import model_config, model_type

LAYERS = 2
HIDDEN, INNER = 192, 280


def only_line(caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    """Level and text."""
    (record,) = (each for each in caplog.records if "dequantised at load" in each.message)
    return record.levelno, record.message


@pytest.fixture(autouse=True)
def informative(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tllm_spec.models")


def test_a_cpu_gets_dequantised_weights_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, plain = save_both("llama", tmp_path)
    model = load(path)
    level, text = only_line(caplog)
    assert level == logging.INFO
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert names in text and "since a CPU would dequantise them in each forward" in text
    assert not fp8_names(model)
    found, expected = (
        PagedRunner(each).step({0: random_tokens(20)})[0] for each in (model, load(plain))
    )
    assert torch.equal(found, expected)


def test_a_gpu_without_fp8_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, plain = save_both("llama", tmp_path)
    placement = Placement(torch.float32, torch.device("cuda"), Mapping(0, 1))
    config = model_config(path)
    prepare_quantised({"": load(plain)}, path, config, "auto", placement)
    level, text = only_line(caplog)
    assert level == logging.WARNING and "since GPUs convert FP8 from compute capability 8.9" in text


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_slices_that_cut_a_block_are_warned_of_with_their_bytes(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = save_both(family, tmp_path)
    config = load(path).config
    caplog.clear()
    placement = Placement(torch.bfloat16, CPU, Mapping(1, 2, 2), quantised=Quantisation("block"))
    model = model_type(config)(config, 64, placement)
    prepare_quantised({"": model}, path, config, "auto", placement)
    level, text = only_line(caplog)
    number = LAYERS * HIDDEN * config.num_heads * config.head_dim // 2
    number += LAYERS * HIDDEN * (INNER // 2 if config.moe is None else 8 * 136 // 2)
    assert level == logging.WARNING
    assert f"down_proj, o_proj ({2 * number:,} bytes on a device instead of {number:,}), " in text
    assert "since the inputs of a rank do not end with a block of 128" in text
    caplog.clear()
    rows = replace(placement, quantised=Quantisation("row"))
    model = model_type(config)(config, 64, rows)
    prepare_quantised({"": model}, path, config, "auto", rows)
    assert not caplog.records


def test_weights_fused_with_others_in_16_bits_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FAMILIES["llama"](tmp_path)
    quantise(tmp_path, lambda name: is_projection(name) and "1.self_attn.k_proj" not in name)
    with keeping_fp8():
        load(tmp_path)
    level, text = only_line(caplog)
    assert level == logging.WARNING and ": q_proj, v_proj (" in text
    assert "since they are fused with weights that the checkpoint has in 16 bits" in text


def test_mtp_modules_say_it_once_and_latent_projections_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_mtp(tmp_path, num_modules=2)
    quantise(tmp_path)
    with keeping_fp8():
        target = load(tmp_path)
        assert only_line(caplog)[0] == logging.INFO
        caplog.clear()
        load_nextn(tmp_path, target, "auto", 2)
    level, text = only_line(caplog)
    assert level == logging.INFO and ": kv_b_proj (" in text and "takes no FP8" in text


def test_settings_without_an_effect_are_named_once_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MTP modules of the target's checkpoint do not repeat them; exported ones have their own."""
    target, exported = tmp_path / "target", tmp_path / "exported"
    target.mkdir()
    save_with_mtp(target)
    quantise(target)
    raw = json.loads((target / "config.json").read_text())
    # Activations in 8-bit integers.
    raw["quantization_config"] = compressed("block", {"type": "int", "num_bits": 8})
    (group,) = raw["quantization_config"]["config_groups"].values()
    group["weights"]["block_structure"] = [128, 128]
    (target / "config.json").write_text(json.dumps(raw))

    def said() -> list[tuple[int, str]]:
        found = [each for each in caplog.records if "is not used" in each.message]
        caplog.clear()
        return [(each.levelno, each.message) for each in found]

    model = load(target)
    assert said() == [(logging.INFO, f"{target}: {GROUP} is not used: {NO_GROUP}")]
    load_nextn(target, model, "auto")
    assert said() == []
    export_modules(target, exported)
    load_nextn(exported, model, "auto", is_exported=True)
    assert [text.startswith(f"{exported}: ") for _, text in said()] == [True]
