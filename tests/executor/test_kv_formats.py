"""Which pools of an engine have FP8 codes, with which scales, and what the log says."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.harness import Harness, draft_target
from tests.models.mtp_reference import save_with_mtp
from tllm_spec.executor.building import kv_formats
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales

FP8 = {"kv_cache_config": {"dtype": "fp8"}}
OWN_TYPE = "the KV cache has the model's own type"


def asking(folder: Path, scheme: dict[str, Any] | str, scales: dict[str, float]) -> Path:
    """The checkpoint with a `kv_cache_scheme` and scales by the names of their tensors."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    own = {f"model.layers.{name}": torch.tensor([scale]) for name, scale in scales.items()}
    save_file(tensors | own, folder / "model.safetensors")
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def scales_of(harness: Harness, group: int = 0) -> list[tuple[KVScales, ...] | None]:
    """An entry for each pool of a group: the target's, then those of its draft layers."""
    kv = harness.executor.parts.kv
    return [pool.kv_format.scales for pool in kv.groups[group].pools]


EIGHT_BITS = {"num_bits": 8, "type": "float"}
SCALES = {"0.self_attn.k_scale": 0.5, "0.self_attn.v_scale": 0.25}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", KVScales(0.5, 0.25)), ("fp8", KVScales(0.5, 0.25)), ("model", None)],
)
def test_a_checkpoint_may_ask_for_an_fp8_cache_and_its_scales_are_used(
    dtype: str, expected: KVScales | None, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asking(copy, EIGHT_BITS, SCALES)
    harness = Harness(copy, kv_cache_config={"dtype": dtype})
    [found] = scales_of(harness)
    assert (found and found[0]) == expected
    assert ("in FP8 (E4M3) with the checkpoint's scales" in caplog.text) == (expected is not None)
    state = harness.executor.state()["kv_cache"]
    assert state["dtype"] == ("float32" if expected is None else "fp8")
    assert f"{state['bytes_per_token']} bytes a token" in caplog.text


def test_without_a_setting_a_cache_has_the_models_type_and_fp8_has_scales_of_one(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizes = []
    for options, expected in ({}, None), (FP8, UNSCALED):
        harness = Harness(tiny, **options)
        [found] = scales_of(harness)
        assert (found and set(found)) == (expected and {expected})
        sizes.append(harness.executor.state()["kv_cache"]["bytes_per_token"])
    assert sizes[0] == 4 * sizes[1]
    assert caplog.text.count("in FP8 (E4M3) with scales of 1.0") == 1


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (EIGHT_BITS | {"strategy": "attn_head"}, "strategy is 'attn_head'"),
        ({"num_bits": 8, "type": "int"}, "type is 'int'"),
    ],
)
def test_a_setting_that_is_not_served_leaves_the_models_type_and_is_said(
    scheme: dict[str, Any], reason: str, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    [found] = scales_of(Harness(asking(copy, scheme, {})))
    assert found is None
    [line] = [line for line in caplog.messages if OWN_TYPE in line]
    assert "not that of kv_cache_scheme" in line and reason in line


def test_a_device_that_does_not_convert_fp8_refuses_it_only_where_it_is_asked_for_by_name(
    copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kv_formats, "_why_no_codes", lambda device: "it converts no FP8")
    with pytest.raises(ValueError, match=r"kv_cache_config\.dtype = 'fp8': it converts no FP8"):
        Harness(copy, **FP8)
    with pytest.raises(ValueError, match=r"speculative_config\.kv_cache_dtype = 'fp8': it conv"):
        Harness(copy, **draft_target(copy, kv_cache_dtype="fp8"))
    [found] = scales_of(Harness(asking(copy, "static", SCALES)))
    assert found is None and "it converts no FP8" in caplog.text


@pytest.mark.parametrize(
    ("own", "has_codes"), [(None, True), ("auto", False), ("model", False), ("fp8", True)]
)
def test_a_draft_model_has_the_targets_option_or_its_own(
    own: str | None, has_codes: bool, tiny: Path, tiny_draft: Path
) -> None:
    options = draft_target(tiny_draft, draft_target_one_model=True, kv_cache_dtype=own)
    target, draft = scales_of(Harness(tiny, **FP8, **options))
    assert target is not None and (draft is not None) == has_codes


def test_an_option_of_a_network_outside_of_torch_is_refused(tiny: Path, tiny_draft: Path) -> None:
    options = draft_target(tiny_draft, draft_backend="onnxruntime", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="its network reads no FP8 KV cache"):
        Harness(tiny, **options)


def test_mtp_modules_follow_the_target_with_scales_of_their_own(tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    asking(tmp_path, EIGHT_BITS, {f"{layers}.self_attn.k_scale": 0.5})
    mtp = {"decoding_type": "MTP", "max_draft_len": 2}
    target, draft = scales_of(Harness(tmp_path, max_seq_len=64, speculative_config=mtp))
    assert target == (UNSCALED,) * layers and draft == (KVScales(0.5, 0.5),)
