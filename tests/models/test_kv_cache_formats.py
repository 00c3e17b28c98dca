"""FP8 KV caches of checkpoints: the setting that asks for one, and the scales of its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.published_fp8 import MODELOPT, NVIDIA_FP8, Raw
from tllm_spec.kernels.attention.kv_codes import KVScales
from tllm_spec.models.formats.kv_cache_formats import kv_cache_setting, read_kv_scales

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
