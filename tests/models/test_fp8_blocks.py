"""FP8 checkpoints with a scale for each block of 128 x 128 are dequantised while they load."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.helpers import PagedRunner, load, random_tokens
from tests.models.mtp_reference import save_with_mtp
from tllm_spec.models.deepseek import DeepseekForCausalLM
from tllm_spec.models.fp8_blocks import dequantised
from tllm_spec.models.mtp import load_nextn

TOKENS = random_tokens(20)
Tensors = dict[str, torch.Tensor]
WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"


def quantise(folder: Path) -> Tensors:
    """Rewrites the checkpoint with every projection but the router's in FP8 blocks. Returns what it
    holds, dequantised."""
    tensors = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = torch.empty(-(-rows // 128), -(-columns // 128))
        weight = torch.empty_like(tensor)
        for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scale.shape)).tolist():
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = tensor[block].abs().max() / 448
            weight[block] = tensor[block] / scale[i, j]
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        whole = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[name] = (stored[name].float() * whole).bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def test_an_fp8_checkpoint_gives_the_logits_of_its_dequantised_weights(tmp_path: Path) -> None:
    for name in ("fp8", "plain"):
        save_with_mtp(tmp_path / name, intermediate_size=200, hidden_size=136)
    dequantised_weights = quantise(tmp_path / "fp8")
    save_file(dequantised_weights, tmp_path / "plain" / "model.safetensors")
    models = [load(tmp_path / name) for name in ("fp8", "plain")]
    logits = [PagedRunner(model).step({0: TOKENS})[0] for model in models]
    assert torch.equal(*logits) and logits[0].std() > 0.3
    modules = []
    for name, model in zip(("fp8", "plain"), models, strict=True):
        assert isinstance(model, DeepseekForCausalLM)
        modules.append(load_nextn(tmp_path / name, model, "auto").state_dict())
    assert modules[0].keys() == modules[1].keys()
    assert all(torch.equal(modules[0][name], modules[1][name]) for name in modules[0])


def test_each_block_has_its_own_scale() -> None:
    weight = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    result = dequantised("w", weight, scale)
    assert result.dtype == torch.bfloat16
    assert result[[0, 127, 128, 129]][:, [0, 127, 128, 255, 256]].tolist() == [
        [1, 1, 2, 2, 4],
        [1, 1, 2, 2, 4],
        [8, 8, 16, 16, 32],
        [8, 8, 16, 16, 32],
    ]


def without_scale(tensors: Tensors) -> None:
    tensors.pop(f"{WEIGHT}_scale_inv")


def with_wrong_scale(tensors: Tensors) -> None:
    tensors[f"{WEIGHT}_scale_inv"] = torch.ones(3, 1)


def with_surplus_scale(tensors: Tensors) -> None:
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_scale, f"has no {WEIGHT}_scale_inv"),
        (with_wrong_scale, rf"{WEIGHT}_scale_inv has the shape \[3, 1\].*needs \[1, 1\]"),
        (with_surplus_scale, "scales of tensors that are not FP8"),
    ],
)
def test_a_missing_misshapen_or_surplus_scale_is_named(
    change: Callable[[Tensors], None], problem: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path)
    quantise(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=problem):
        load(tmp_path)
