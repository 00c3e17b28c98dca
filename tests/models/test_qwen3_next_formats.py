"""Qwen3-Next and Qwen3.5 with quantised weights: logits are those of transformers with the
dequantised ones, in every published layout; what is missing or surplus is refused by name."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.fp8_checkpoint import BLOCK, keeping_fp8, keeping_int4, tiled
from tests.models.fp8_checkpoint import quantise as quantise_fp8
from tests.models.helpers import (
    CPU,
    MAX_POSITIONS,
    PagedRunner,
    assert_close,
    load,
    random_tokens,
    reference_logits,
)
from tests.models.mtp_reference import modules_of
from tests.models.published_fp8 import QWEN3_5_FP8
from tests.models.qwen3_next import (
    FULL,
    LINEAR,
    PlainMTP,
    save_qwen3_next,
    save_with_images,
    save_with_mtp,
)
from tests.models.test_fp8_activations import check_log_probabilities
from tests.models.test_mtp import ModuleRunner
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.registry import blank_model, model_config_of, weight_bytes
from tllm_spec.models.weights import weight_table
from tllm_spec.zoo.quantise import Style
from tllm_spec.zoo.quantise import quantise as quantise_int4

# No width of a projection but those of hidden states in 4 bits is a multiple of 128.
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 288,
    "moe_intermediate_size": 160,
    "shared_expert_intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
TENSORS = "model.safetensors"
TOKENS = random_tokens(MAX_POSITIONS, seed=3)
Quantise = Callable[..., dict[str, torch.Tensor]]
FORMATS: dict[str, Quantise] = {
    "fp8 blocks": partial(quantise_fp8, granularity="deepseek"),
    "fp8 rows": partial(quantise_fp8, granularity="row"),
    "fp8 tensors": partial(quantise_fp8, granularity="modelopt"),
    **{name: partial(quantise_int4, style=Style(name)) for name in ("awq", "gptq", "nvfp4")},
    "gptq, desc_act": partial(quantise_int4, style=Style("gptq", is_ordered=True)),
    "compressed": partial(quantise_int4, style=Style("compressed", 32)),
}
FAMILIES = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")


def as_modelopt(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """NVFP4 with ModelOpt's names, and static scales of activations next to it."""
    values = quantise_int4(folder, Style("nvfp4"), **options)
    tensors = load_file(folder / TENSORS)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        tensors[f"{module}.weight"] = tensors.pop(name)
        factor = 1 / tensors.pop(f"{module}.weight_global_scale")
        tensors |= {
            f"{module}.weight_scale_2": factor.view(()),
            f"{module}.input_scale": factor + 1,
        }
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    configure(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return values


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    text = json.dumps(raw | {"quantization_config": quantization})
    (folder / "config.json").write_text(text)


FORMATS["modelopt"] = as_modelopt


def is_published(name: str) -> bool:
    """What Qwen's own checkpoints have in FP8, also of the layer that predicts a further token."""
    module = name.removesuffix(".weight")
    is_gate = module.endswith(("in_proj_b", "in_proj_a", "in_proj_ba"))
    return name.endswith("_proj.weight") or ("in_proj_" in module and not is_gate)


def as_mixed_modelopt(
    folder: Path, wants: Callable[[str], bool] = is_published
) -> dict[str, torch.Tensor]:
    """The layers with a state in FP8, with a scale each, in rows or in blocks; others in NVFP4."""
    kinds = {"in_proj_qkv": "row", "in_proj_z": "block", "out_proj": "tensor"}
    values: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / TENSORS).items():
        module = name.removesuffix(".weight")
        if wants(name) and ".linear_attn." in name:
            kind = next(kind for part, kind in kinds.items() if part in module)
            stored[name], stored[f"{name}_scale"], values[name] = tiled(tensor, kind)
            layers[module] = {"quant_algo": "FP8"}
        elif wants(name):
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
    values |= (
        as_modelopt(folder, wants=lambda name: wants(name) and ".linear_attn." not in name) | values
    )
    save_file(load_file(folder / TENSORS) | stored, folder / TENSORS)
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    configure(folder, {"quant_method": "modelopt", **mixed})
    return values


FORMATS["modelopt, mixed"] = as_mixed_modelopt


def but(*parts: str) -> Callable[[str], bool]:
    """What a recipe quantises that leaves modules out."""
    return lambda name: is_published(name) and not any(part in name for part in parts)


def quantised(
    folder: Path, family: str, quantise: Quantise, **config: Any
) -> dict[str, torch.Tensor]:
    """Writes a quantised model; returns the dequantised weights."""
    save_qwen3_next(folder, family=family, **SIZES | config)
    return quantise(folder)


def saved(folder: Path, family: str, quantise: Quantise, **config: Any) -> Any:
    """Writes a quantised model; returns transformers' one with the dequantised weights."""
    values, plain = quantised(folder, family, quantise, **config), folder / "plain"
    plain.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(raw))
    save_file(values, plain / TENSORS, metadata={"format": "pt"})
    kind = getattr(transformers, f"{family}ForCausalLM")
    return kind.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize("left_out", [(), ("linear_attn",), ("in_proj_z",), ("mlp",)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.covering
def test_logits_are_those_of_the_dequantised_weights(
    name: str, family: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    wants = but(*left_out)
    expected = reference_logits(
        saved(tmp_path, family, partial(FORMATS[name], wants=wants)), TOKENS
    )
    with keeping_fp8(), keeping_int4():
        model = load(tmp_path, fp8_activations=False)
    assert_close(PagedRunner(model, num_pages=128).step({0: TOKENS})[0], expected)
    slots = weight_table(model)
    kept = {each for each in slots if slots[each].is_quantised}
    assert kept <= {each for each in slots if wants(each)}
    is_ordered = "experts." if "desc_act" in name else ","
    fused = "in_proj_" if "in_proj_z" in left_out else ","
    in_fp8 = "linear_attn" if name == "modelopt, mixed" else ","
    rest = {each for each in slots if wants(each)} - kept
    assert all(is_ordered in each or fused in each or in_fp8 in each for each in rest)


@pytest.mark.parametrize("left_out", [(), ("shared_expert",)])
@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "modelopt"])
@pytest.mark.thinned(3)
def test_a_shared_expert_as_wide_as_the_others_is_one_of_them_if_it_is_quantised_as_they_are(
    name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    quantise, wide = partial(FORMATS[name], wants=but(*left_out)), SIZES["moe_intermediate_size"]
    own = saved(tmp_path, "Qwen3_5Moe", quantise, shared_expert_intermediate_size=wide)
    with keeping_fp8(), keeping_int4():
        model = load(tmp_path, fp8_activations=False)
    layers = [layer for layer in model.modules() if isinstance(layer, SparseMoE)]
    assert layers and all((layer.shared is None) == (not left_out) for layer in layers)
    assert any(slot.is_quantised for name, slot in weight_table(model).items() if "experts" in name)
    found = PagedRunner(model, num_pages=128).step({0: TOKENS})[0]
    assert_close(found, reference_logits(own, TOKENS))


@pytest.mark.covering
@pytest.mark.parametrize("left_out", [(), ("linear_attn",), ("in_proj_z", "mlp")])
@pytest.mark.parametrize("name", ["fp8 blocks", "modelopt"])
def test_the_memory_plan_counts_what_has_16_bits_as_such(
    name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    quantised(tmp_path, "Qwen3_5Moe", partial(FORMATS[name], wants=but(*left_out)))
    with keeping_fp8(), keeping_int4():
        dtype = torch.bfloat16
        blank = blank_model(
            tmp_path, dtype=dtype, device=CPU, mapping=SINGLE_RANK, fp8_activations=False
        )
        loaded = load(tmp_path, fp8_activations=False, dtype=dtype)
    assert weight_bytes(blank, CPU) == sum(each.nbytes for each in loaded.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("granularity", ["deepseek", "row"])
@pytest.mark.thinned
@torch.inference_mode()
def test_activations_in_fp8_are_those_of_a_plain_transcription(
    granularity: str, family: str, tmp_path: Path
) -> None:
    reference = save_qwen3_next(tmp_path, family=family, **SIZES)
    quantise_fp8(tmp_path, is_published, granularity)
    check_log_probabilities(reference, tmp_path, share=0.1)


def in_one_tensor(experts: list[torch.Tensor], parts: int) -> tuple[torch.Tensor, ...]:
    """Experts `[N, K]` in FP8: codes, scales as stored, and values. parts: the matrices of an
    expert that have blocks of their own."""
    tiles = [[tiled(part) for part in expert.chunk(parts)] for expert in experts]
    return tuple(
        torch.stack([torch.cat([part[kind] for part in expert]) for expert in tiles])
        for kind in range(3)
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_experts_in_one_tensor_have_blocks_of_all_outputs_or_of_gates_and_ups(
    parts: int, tmp_path: Path
) -> None:
    model = save_with_images(tmp_path, "Qwen3_5Moe", **SIZES)
    tensors, values = load_file(tmp_path / TENSORS), dict(model.named_parameters())
    for name in [name for name in tensors if ".mlp.experts." in name]:
        own = in_one_tensor([*tensors[name]], parts if "gate_up" in name else 1)
        tensors[name], tensors[f"{name}_scale_inv"] = own[:2]
        values[name.replace("language_model.", "")].data.copy_(own[2])
    assert len(tensors["model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv"][0]) == (
        3 if parts == 1 else 4
    )
    save_file(tensors, tmp_path / TENSORS)
    configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    with keeping_fp8():
        served = load(tmp_path, fp8_activations=False)
    expected = reference_logits(model, TOKENS)
    assert_close(PagedRunner(served, num_pages=128).step({0: TOKENS})[0], expected)
    slots = weight_table(served)
    assert {name for name in slots if slots[name].is_quantised} == {
        name for name in slots if ".mlp.experts." in name
    }


LAYER = "model.layers.0"


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    own = load_file(folder / TENSORS) | tensors
    save_file({name: each for name, each in own.items() if each is not None}, folder / TENSORS)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fp8 blocks", "linear_attn.in_proj_qkv.weight"),
        ("fp8 blocks", "linear_attn.in_proj_z.weight_scale_inv"),
        ("fp8 blocks", "linear_attn.in_proj_b.weight"),
        ("fp8 blocks", "mlp.experts.3.up_proj.weight_scale_inv"),
        ("fp8 rows", "linear_attn.out_proj.weight_scale"),
        ("fp8 tensors", "mlp.shared_expert.down_proj.weight"),
        ("awq", "linear_attn.in_proj_qkv.scales"),
        ("gptq", "linear_attn.in_proj_z.qweight"),
        ("nvfp4", "linear_attn.in_proj_z.weight_global_scale"),
        ("modelopt", "mlp.experts.0.down_proj.weight_scale_2"),
        ("modelopt, mixed", "linear_attn.in_proj_qkv.weight_scale"),
        ("modelopt, mixed", "linear_attn.out_proj.weight"),
        ("compressed", "linear_attn.in_proj_a.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(name: str, tensor: str, tmp_path: Path) -> None:
    quantised(tmp_path, "Qwen3_5Moe", partial(FORMATS[name], wants=is_published))
    changed(tmp_path, **{f"{LAYER}.{tensor}": None})
    module = f"{LAYER}.{tensor}".rpartition(".")[0]
    with keeping_fp8(), keeping_int4(), pytest.raises(ValueError, match=module):
        load(tmp_path)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "tensor", ["linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_c.weight_scale"]
)
def test_a_surplus_tensor_is_refused_by_name(name: str, tensor: str, tmp_path: Path) -> None:
    quantised(tmp_path, "Qwen3_5Moe", partial(FORMATS[name], wants=is_published))
    changed(tmp_path, **{f"{LAYER}.{tensor}": torch.ones(2, 2)})
    with keeping_fp8(), keeping_int4(), pytest.raises(ValueError, match=f"{LAYER}.{tensor}"):
        load(tmp_path)


SPLIT = [f"{LAYER}.linear_attn.in_proj_{part}" for part in ("qkv", "z")]
LISTS = {
    "names": SPLIT,
    "names in one": [f"{LAYER}.linear_attn.in_proj_qkvz"],
    "images": [f"model.language_model.{LAYER[6:]}.linear_attn.in_proj_qkvz"],
    "older images": [name.replace("model.", "language_model.model.", 1) for name in SPLIT],
    "no prefix": ["re:layers.0.linear_attn.*"],
    "expression": [r"re:^model\.language_model\.layers\.0\.linear_attn\.in_proj_(qkv|z)$"],
    "what is not there": ["re:.*linear_attn.*", "re:visual.*", f"{LAYER}.linear_attn.in_proj_c"],
    "stars": ["*linear_attn.in_proj_qkvz*"],
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5"])
@pytest.mark.parametrize("name", LISTS)
def test_without_tensors_a_list_of_any_spelling_leaves_modules_out(
    name: str, family: str, tmp_path: Path
) -> None:
    save_qwen3_next(tmp_path, family=family, **SIZES)
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    configure(tmp_path, fp8 | {"modules_to_not_convert": LISTS[name]})
    with keeping_fp8():
        model = load(tmp_path, load_format="dummy", fp8_activations=False)
    slots = weight_table(model)
    wide = [name for name in slots if is_published(name) and not slots[name].is_quantised]
    assert {f"{LAYER}.linear_attn.in_proj_"} <= {name[: name.rfind("_") + 1] for name in wide}
    assert all(".linear_attn." in name for name in wide)


def test_qwen3_5_has_b_and_a_of_gated_delta_nets_in_16_bits() -> None:
    found = model_config_of(QWEN3_5_FP8).quantisation
    parts = ("in_proj_qkv", "in_proj_z", "out_proj", "in_proj_b", "in_proj_a")
    kept = [part for part in parts if found.keeps(f"{LAYER}.linear_attn.{part}")]
    assert kept == [*parts[:3]] and not found.keeps("mtp.fc")
    assert found.keeps("mtp.layers.0.self_attn.q_proj")


# The layer that predicts a further token.


def saved_with_mtp(folder: Path, name: str, *left_out: str) -> PlainMTP:
    """Writes a quantised model with the layer; returns its transcription, dequantised."""
    model = save_with_mtp(folder, family="Qwen3_5Moe", **SIZES)
    plain = folder / "plain"
    plain.mkdir()
    save_file(FORMATS[name](folder, wants=but(*left_out)), plain / TENSORS)
    return PlainMTP(model, plain)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("left_out", [(), ("mtp.",), ("mtp.layers.0.self_attn",)])
@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "modelopt"])
def test_the_next_token_layer_has_16_bits_where_the_checkpoint_has(
    name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    plain = saved_with_mtp(tmp_path, name, *left_out)
    tokens = random_tokens(31)
    hidden = torch.randn(30, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    with keeping_fp8(), keeping_int4():
        target = load(tmp_path, fp8_activations=False)
        modules = modules_of(tmp_path, target, fp8_activations=False)
    found = ModuleRunner(modules).predict(tokens[1:], hidden)
    torch.testing.assert_close(found, plain.states(tokens[1:], hidden), rtol=0, atol=1e-4)
    kept = [name for name, slot in weight_table(modules).items() if slot.is_quantised]
    assert bool(kept) == (left_out != ("mtp.",))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "modelopt"])
@pytest.mark.parametrize("part", ["mtp.", "mtp.fc.", "mtp.layers.0.mlp.experts.2.up_proj."])
def test_a_next_token_layer_that_a_converter_has_dropped_is_refused_by_name(
    name: str, part: str, tmp_path: Path
) -> None:
    saved_with_mtp(tmp_path, name)
    tensors = load_file(tmp_path / TENSORS)
    changed(tmp_path, **dict.fromkeys(each for each in tensors if each.startswith(part)))
    with keeping_fp8(), keeping_int4():
        target = load(tmp_path)
        missing = r"fc" if part != "mtp.layers.0.mlp.experts.2.up_proj." else r"layers\.0\.mlp"
        with pytest.raises(ValueError, match=rf"mtp\..* fit an MTP module: missing {missing}"):
            modules_of(tmp_path, target)
