"""Weights that a checkpoint has in FP8 stay in FP8: with the logits of their dequantised values."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import Tensors, is_projection, quantise, tiled
from tests.models.helpers import (
    CPU,
    PagedRunner,
    check_same_logits,
    load,
    quantised_pair,
    random_tokens,
    save_checkpoint,
)
from tests.models.mtp_reference import export_modules, modules_of, save_with_mtp
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.formats import quantised_layers
from tllm_spec.models.formats.fp8 import Fp8Tensor, ScaledSlot
from tllm_spec.models.formats.quantisation import Granularity, Quantisation
from tllm_spec.models.formats.quantised_layers import with_quantised
from tllm_spec.models.layers import Module, Placement, WeightSlot
from tllm_spec.models.linear import Linear
from tllm_spec.models.registry import model_config, model_type
from tllm_spec.models.weights import weight_table

pytestmark = pytest.mark.usefixtures("fp8_on_cpu")
FP8 = torch.float8_e4m3fn
TOKENS = random_tokens(20)
WEIGHT = "model.layers.1.self_attn.q_b_proj.weight"
# Sizes that blocks of 128 cut, and others.
SIZES = {"hidden_size": 192, "intermediate_size": 280}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 136}
FAMILIES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda folder: save_checkpoint(folder, "Llama", mlp_bias=True, **SIZES),
    "qwen3-moe": lambda folder: save_checkpoint(folder, "Qwen3Moe", **SIZES, **EXPERTS),
    "mixtral": lambda folder: save_checkpoint(folder, "Mixtral", num_local_experts=4, **SIZES),
    "deepseek-v2": lambda folder: save_deepseek(folder, "DeepseekV2", hidden_size=136),
    "deepseek-v3": lambda folder: save_with_mtp(folder, hidden_size=136, intermediate_size=200),
}


def save_both(family: str, folder: Path, granularity: str = "block") -> tuple[Path, Path]:
    """The model in FP8, and the same values in float32."""
    return quantised_pair(folder, FAMILIES[family], partial(quantise, granularity=granularity))


def fp8_names(model: Module) -> set[str]:
    return {name for name, slot in weight_table(model).items() if isinstance(slot, ScaledSlot)}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp8_checkpoint_gives_the_logits_of_its_dequantised_weights(
    family: str, tmp_path: Path
) -> None:
    models = [load(path) for path in save_both(family, tmp_path)]
    assert check_same_logits(*models, tokens=TOKENS).std() > 0.3
    names = {name for name in weight_table(models[0]) if is_projection(name)}
    assert fp8_names(models[0]) == {name for name in names if "kv_b_proj" not in name}
    sizes = [sum(each.nbytes for each in model.parameters()) for model in models]
    assert sizes[0] < 0.6 * sizes[1]


def test_mtp_modules_keep_fp8_too(tmp_path: Path) -> None:
    modules = []
    for path in save_both("deepseek-v3", tmp_path):
        target = load(path)
        modules.append(modules_of(path, target))
    found, expected = modules
    (layer,) = found.modules_by_step
    assert layer.mlp.experts.gate_up.dtype == FP8 and layer.eh_proj.weight.dtype != FP8
    for path, module in expected.named_modules():
        if isinstance(module, Linear):
            own = found.get_submodule(path)
            assert isinstance(own, Linear)
            assert torch.equal(own.full_weight(), module.weight)


def test_exported_modules_keep_fp8_as_modelopts_file_and_the_names_of_scales_say(
    tmp_path: Path,
) -> None:
    """Also next to a target in 16 bits."""
    path, plain = save_both("deepseek-v3", tmp_path)
    whole = load(path)
    expected = dict(modules_of(path, whole).named_parameters())
    exported = tmp_path / "exported"
    export_modules(path, exported)
    raw = json.loads((exported / "config.json").read_text())
    del raw["quantization_config"]
    (exported / "config.json").write_text(json.dumps(raw))
    modelopt = {"quantization": {"quant_algo": "FP8_PB_WO"}}
    (exported / "hf_quant_config.json").write_text(json.dumps(modelopt))
    target = load(plain)
    found = dict(modules_of(exported, target, is_exported=True).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert found["steps.0.mlp.experts.gate_up"].dtype == FP8


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("sizes", "granularity"),
    [((2, 1), "block"), ((4, 1), "block"), ((2, 2), "block"), ((4, 1), "row"), ((2, 2), "tensor")],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_ranks_have_their_part_of_weights_and_scales(
    family: str, sizes: tuple[int, int], granularity: Granularity, tmp_path: Path
) -> None:
    """Only slices that cut a block of inputs with one scale are dequantised."""
    path, _ = save_both(family, tmp_path, granularity)
    whole = load(path)
    in_fp8 = fp8_names(whole)
    tp_size, ep_size = sizes
    for rank in range(tp_size):
        placement = Placement(
            torch.float32,
            CPU,
            Mapping(rank, tp_size, tp_size, ep_size),
            quantised=Quantisation(granularity),
        )
        model = model_type(whole.config)(whole.config, 64, placement)
        stored = dict(
            whole.stored_tensors(path, whole.config, lambda name: not whole.ignores(name))
        )
        own, full = weight_table(model), weight_table(whole)
        for name, slot in own.items():
            slot.load(stored[name])
            if slot.destination is None or len(slot.shape) == 1:
                continue
            expected = full[name]
            assert expected.destination is not None
            part = values(expected)
            if slot.shard_dim is not None:
                length = slot.destination.shape[slot.shard_dim]
                part = part.narrow(slot.shard_dim, slot.start, length)
            assert torch.equal(values(slot), part), name
            if name in in_fp8:
                is_cut = slot.shard_dim == 1 and slot.destination.shape[1] % 128 > 0
                is_split = slot.destination.shape != slot.shape
                assert isinstance(slot, ScaledSlot) != (
                    is_cut and is_split and granularity == "block"
                )


def values(slot: WeightSlot) -> torch.Tensor:
    assert slot.destination is not None
    if not isinstance(slot, ScaledSlot):
        return slot.destination.float()
    assert slot.scales is not None
    columns = -(-slot.destination.shape[1] // 128)
    return Fp8Tensor(slot.destination, slot.scales.expand(-1, columns)).dequantised(torch.float32)


def test_a_layer_that_the_checkpoint_has_in_16_bits_keeps_them(tmp_path: Path) -> None:
    """Also if only a part of what is fused has 16 bits."""
    FAMILIES["llama"](tmp_path)
    wide = ("layers.0.mlp.down_proj", "layers.1.self_attn.k_proj")
    quantise(tmp_path, lambda name: is_projection(name) and not any(map(name.__contains__, wide)))
    names = fp8_names(load(tmp_path))
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.0.mlp.down_proj.weight" not in names
    assert not any(name.startswith("model.layers.1.self_attn.q_proj") for name in names)


def test_a_checkpoint_with_a_quantised_cache_only_is_that_of_its_16_bit_weights(
    tmp_path: Path,
) -> None:
    for name in ("cache", "plain"):
        FAMILIES["llama"](tmp_path / name)
    tensors = load_file(tmp_path / "cache" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "cache" / "model.safetensors")
    raw = json.loads((tmp_path / "cache" / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float"}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (tmp_path / "cache" / "config.json").write_text(json.dumps(raw))
    found, expected = (load(tmp_path / name).state_dict() for name in ("cache", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("capability", "keeps"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8_get_dequantised_weights(
    capability: tuple[int, int], keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = save_both("llama", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = model_config(path)
    placement = Placement(torch.bfloat16, torch.device("cuda", 0), Mapping(0, 1))
    assert (with_quantised(placement, config).quantised.fp8 == "block") == keeps
    assert with_quantised(placement, model_config(plain)) == placement
    monkeypatch.setattr(quantised_layers, "multiplies_fp8", lambda device: keeps)
    model = load(path)
    assert bool(fp8_names(model)) == keeps
    check_same_logits(model, load(plain), tokens=TOKENS)


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_dummy_weights_are_in_fp8_and_normal(family: str, tmp_path: Path) -> None:
    path, _ = save_both(family, tmp_path)
    (path / "model.safetensors").unlink()
    model = load(path, load_format="dummy")
    logits = PagedRunner(model).step({0: TOKENS})[0]
    assert logits.isfinite().all() and logits.std() > 0.1
    assert fp8_names(model)
    down = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, Linear)
    weight = down.full_weight()
    assert abs(weight.std() * weight.shape[1] ** 0.5 - 1) < 0.1


def test_dummy_weights_of_ignored_modules_have_16_bits(tmp_path: Path) -> None:
    FAMILIES["llama"](tmp_path)
    quantise(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["exclude_modules"] = ["self_attn", "layers.0.mlp.up_proj"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").unlink()
    names = fp8_names(load(tmp_path, load_format="dummy"))
    down = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    fused = {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")}
    assert names == down | fused


def test_each_block_has_its_own_scale(tmp_path: Path) -> None:
    weight = torch.ones(130, 257).to(FP8)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    stored, own, _ = tiled(torch.ones(130, 257))
    assert torch.equal(stored.float(), torch.full((130, 257), 448.0)) and own.shape == scale.shape
    FAMILIES["llama"](tmp_path)
    quantise(tmp_path)
    config = load(tmp_path).config
    assert config.quantisation.fp8 is not None
    tensor = Fp8Tensor(weight, config.quantisation.row_scales(scale, (130, 257), "w"))
    assert tensor.dequantised(torch.float32)[[0, 127, 128, 129]][
        :, [0, 127, 128, 255, 256]
    ].tolist() == [[1, 1, 2, 2, 4], [1, 1, 2, 2, 4], [8, 8, 16, 16, 32], [8, 8, 16, 16, 32]]


def without_scale(tensors: Tensors) -> None:
    tensors.pop(f"{WEIGHT}_scale_inv")


def with_wrong_scale(tensors: Tensors) -> None:
    tensors[f"{WEIGHT}_scale_inv"] = torch.ones(3, 1)


def with_surplus_scale(tensors: Tensors) -> None:
    tensors["model.layers.0.input_layernorm.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_scale, f"has no {WEIGHT}_scale_inv"),
        (with_wrong_scale, rf"{WEIGHT}_scale_inv.*\[3, 1\].*needs .*\[1, 1\]"),
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
