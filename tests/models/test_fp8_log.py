"""What a start says of quantised weights in the log, and the formats of the cache that checkpoints
name."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.fp8_checkpoint import compressed, is_projection, keeping_fp8, quantise
from tests.models.helpers import CPU, PagedRunner, load, random_tokens
from tests.models.mtp_reference import export_modules, modules_of, save_with_mtp
from tests.models.published_fp8 import MODELOPT, NVIDIA_FP8, Raw
from tests.models.test_fp8 import FAMILIES, fp8_names, save_both
from tests.models.test_fp8_formats import GROUP, NO_GROUP
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.kernels.attention.kv_codes import KVScales
from tllm_spec.models.formats.kv_cache_formats import kv_cache_setting, read_kv_scales
from tllm_spec.models.formats.quantisation import Quantisation
from tllm_spec.models.formats.quantised_layers import prepare_quantised
from tllm_spec.models.layers import Placement
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
        modules_of(tmp_path, target, 2)
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
    modules_of(target, model)
    assert said() == []
    export_modules(target, exported)
    modules_of(exported, model, is_exported=True)
    assert [text.startswith(f"{exported}: ") for _, text in said()] == [True]


EIGHT_BITS = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({}, None, None),
        ({"kv_cache_scheme": None}, None, None),
        ({"kv_cache_scheme": EIGHT_BITS | {"strategy": "tensor"}}, "kv_cache_scheme", None),
        ({"kv_cache_scheme": EIGHT_BITS | {"dynamic": False}}, "kv_cache_scheme", None),
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme", None),
        ({"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo", None),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo", None),
        ({"kv_cache_quant_algo": "NONE"}, None, None),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo", "'NVFP4' (served: 'fp8')"),
        (
            {"kv_cache_scheme": EIGHT_BITS | {"strategy": "attn_head", "dynamic": True}},
            "kv_cache_scheme",
            "kv_cache_scheme.strategy is 'attn_head' (served: 'tensor' or None); "
            "kv_cache_scheme.dynamic is True",
        ),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme", "type is 'int'"),
    ],
)
def test_the_setting_is_found_and_what_is_not_served_is_said(
    settings: Raw, key: str | None, reason: str | None
) -> None:
    found = kv_cache_setting(None, {"quantization_config": settings | {"quant_method": "fp8"}})
    assert (found and found.key) == key
    if found is not None:
        assert (found.why_not is None) == (reason is None)
        assert reason is None or (found.why_not and reason in found.why_not)


def test_published_checkpoints_of_nvidia_ask_for_fp8() -> None:
    found = kv_cache_setting(None, {"quantization_config": NVIDIA_FP8 | MODELOPT})
    assert found is not None and found.why_not is None


def scales_of(folder: Path, tensors: dict[str, Any], prefix: str = "") -> tuple[KVScales, ...]:
    names = {f"{prefix}model.layers.{name}": torch.tensor(each) for name, each in tensors.items()}
    save_file(names | {"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    return read_kv_scales(folder, range(4), lambda name: name.removeprefix(prefix))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_scales_are_read_by_every_name_and_are_one_without_a_tensor(
    tmp_path: Path, prefix: str
) -> None:
    own = {
        "0.self_attn.k_proj.k_scale": [0.5],
        "0.self_attn.v_proj.v_scale": 0.25,
        "1.self_attn.k_scale": 0.5,
        "1.self_attn.q_scale": 3.0,
        "2.self_attn.kv_scale": 0.125,
        "2.self_attn.k_proj.weight_scale": 7.0,
        "2.self_attn.k_proj.input_scale": 7.0,
    }
    expected = KVScales(0.5, 0.25), KVScales(0.5, 0.5), KVScales(0.125, 0.125), KVScales()
    assert scales_of(tmp_path, own, prefix) == expected


def test_scales_of_early_compressed_tensors_are_those_of_the_projections_outputs(
    tmp_path: Path,
) -> None:
    own = {f"0.self_attn.{each}_proj.output_scale": 0.5 for each in "kv"}
    assert scales_of(tmp_path, own)[0] == KVScales(0.5, 0.5)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [0.5, 0.5]])
def test_a_scale_that_is_not_one_positive_number_is_refused(tmp_path: Path, scale: Any) -> None:
    with pytest.raises(ValueError, match=r"0\.self_attn\.k_scale .* one positive number"):
        scales_of(tmp_path, {"0.self_attn.k_scale": scale})
