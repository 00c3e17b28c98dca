"""Logits with adapters equal those of a model into which they are merged."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters.folders import linear_shapes, merged, random_pairs, write_adapter
from tests.distributed.thread_ranks import ThreadGroup
from tests.distributed.tiny_models import EXPERTS
from tests.models.deepseek import save_deepseek
from tests.models.fp8_checkpoint import keeping_fp8, keeping_int4
from tests.models.fp8_checkpoint import quantise as quantise_fp8
from tests.models.gemma4 import save_larger
from tests.models.gpt_oss import save_gpt_oss
from tests.models.helpers import (
    PagedRunner,
    load,
    quantised_pair,
    random_tokens,
    save_checkpoint,
)
from tests.models.qwen3_next import save_qwen3_next
from tests.models.test_gemma3 import save_gemma3
from tests.models.test_llama4 import save_llama4
from tests.models.test_phi3 import save as save_phi3
from tllm_spec.adapters import adapted_layers
from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.adapters.adapter_folder import read_adapter
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.choice import create_backend
from tllm_spec.distributed.communicator import SINGLE, SINGLE_RANK, Communicator, Mapping
from tllm_spec.executor.weight_swap import pairs_of
from tllm_spec.kernels.gemm.small_m_gemm import plain_small_m_gemm
from tllm_spec.models.formats import weight_format
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.moe import Router
from tllm_spec.models.weights import weight_table
from tllm_spec.zoo.quantise import Style, quantise
from tllm_spec.zoo.registry import resolve_model

TOKENS = random_tokens(24)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = tuple(f"shared_expert{s}.{name}" for s in ("", "s") for name in MLP)
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *SHARED)
DELTA = ("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate")


@dataclass(frozen=True)
class Family:
    """A random model, and the ends of the names of the modules that are adapted."""

    save: Callable[[Path], object]
    modules: tuple[str, ...]
    targets: tuple[str, ...] | None = None


def tiny(name: str, **config: Any) -> Callable[[Path], object]:
    return partial(save_checkpoint, architecture=name, **config)


def zoo(name: str) -> Callable[[Path], object]:
    return partial(shutil.copytree, resolve_model(f"zoo:{name}"))


FAMILIES = {
    "zoo llama": Family(zoo("llama"), ATTENTION + MLP),
    "zoo deepseek": Family(zoo("deepseek"), LATENT + MLP, ("experts", *LATENT, *MLP)),
    "llama": Family(tiny("Llama"), ATTENTION + MLP),
    "llama, biases and one KV head": Family(
        tiny("Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=1), ATTENTION + MLP
    ),
    "llama, q and v only": Family(tiny("Llama"), ("q_proj", "v_proj")),
    "llama, gates only": Family(tiny("Llama"), ("gate_proj",), ("gate_proj",)),
    "gemma 3": Family(save_gemma3, ATTENTION + MLP),
    "gemma 4, experts": Family(partial(save_larger, kind="experts"), ("router.proj",), ("proj",)),
    "gemma 4": Family(save_larger, (*ATTENTION, *MLP, "per_layer_input_gate")),
    "phi 3": Family(save_phi3, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "olmo 2": Family(tiny("Olmo2"), ATTENTION + MLP),
    "deepseek v2": Family(partial(save_deepseek, architecture="DeepseekV2"), LATENT),
    "deepseek v3": Family(partial(save_deepseek, architecture="DeepseekV3"), LATENT),
    "deepseek, no q_lora": Family(
        partial(save_deepseek, architecture="DeepseekV3", q_lora_rank=None), LATENT
    ),
    "deepseek v3, experts": Family(
        partial(save_deepseek, architecture="DeepseekV3"),
        (*LATENT, *MLP, "gate"),
        ("experts", "gate", *LATENT, *MLP),
    ),
    "qwen 3 moe": Family(tiny("Qwen3Moe", **EXPERTS), ATTENTION),
    "qwen 3 moe, experts": Family(tiny("Qwen3Moe", **EXPERTS), (*MLP, "gate"), ("experts", "gate")),
    "qwen 2 moe": Family(
        tiny("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=40),
        (*ATTENTION, *SHARED, "shared_expert_gate"),
    ),
    "mixtral, experts": Family(tiny("Mixtral"), ("w1", "w2", "w3"), ("experts",)),
    "llama 4, attention": Family(save_llama4, ATTENTION),
    "gpt-oss, attention and router": Family(
        save_gpt_oss, (*ATTENTION, "router"), (*ATTENTION, "router")
    ),
    "qwen 3 next": Family(save_qwen3_next, ATTENTION + DELTA + SHARED),
    "qwen 3 next, fused shared expert": Family(
        partial(save_qwen3_next, shared_expert_intermediate_size=24), ATTENTION + DELTA + SHARED
    ),
}
FAST = ("llama", "deepseek v3, experts", "qwen 3 next")


@torch.inference_mode()
def with_tables(
    model: CausalLM, targets: Any = None, slots: int = 2, rank: int = 8
) -> AdapterTables:
    tables = AdapterTables(model, slots, rank, 128, targets)
    tables.rows.is_active = True
    return tables


@torch.inference_mode()
def put(tables: AdapterTables, slot: int, folder: Path) -> None:
    adapter = read_adapter(folder, 8)
    tables.check(adapter)
    tables.load(slot, adapter)


@torch.inference_mode()
def logits(
    model: CausalLM,
    tables: AdapterTables | None,
    slots: list[int],
    mapping: Mapping = SINGLE_RANK,
    tokens: list[int] = TOKENS,
) -> list[torch.Tensor]:
    """One forward gives them, of the tokens for each slot."""
    runner = PagedRunner(model, mapping=mapping)
    if tables is not None:
        own = torch.tensor(slots, dtype=torch.int32).repeat_interleave(len(tokens))
        tables.rows.slots[: len(own)] = own
        tables.rows.begin(len(own), None)
    return list(runner.step(dict.fromkeys(range(len(slots)), tokens)).values())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 5e-4 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES],
)
def test_each_family_with_an_adapter_equals_the_merged_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.save(tmp_path / "base")
    tables = with_tables(model := load(tmp_path / "base"), family.targets)
    shapes = linear_shapes(load_file(tmp_path / "base/model.safetensors"), *family.modules)
    known = {name.removesuffix(".weight") for name in weight_table(model)}
    pairs = random_pairs({name: shape for name, shape in shapes.items() if name in known})
    put(tables, 1, write_adapter(tmp_path / "adapter", pairs))
    found, without = logits(model, tables, [-1, 1]), logits(model, tables, [-1, -1])
    tables.rows.is_active = False
    plain = logits(model, tables, [-1, -1])[0]
    [expected] = logits(
        load(merged(tmp_path / "base", tmp_path / "merged", pairs, 2.0)), None, [-1]
    )
    assert torch.equal(without[0], plain)
    close(found[0], plain)
    close(found[1], expected)
    assert (found[1] - plain).abs().max() > 0.3


STACKS: dict[str, Callable[[Path], object]] = {
    "gpt-oss": save_gpt_oss,
    "qwen 3 moe": tiny("Qwen3Moe", **EXPERTS),
    "deepseek v3": partial(save_deepseek, architecture="DeepseekV3"),
    "llama 4": save_llama4,
}
SIZES_OF_EXPERTS = {
    "gpt-oss": (6, 64, 96),
    "qwen 3 moe": (8, 64, 48),
    "deepseek v3": (8, 64, 24),
    "llama 4": (4, 64, 48),
}


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("name", STACKS)
def test_parameters_with_all_experts_equal_the_merged_model(
    name: str, is_swapped: bool, tmp_path: Path
) -> None:
    STACKS[name](tmp_path / "base")
    number, hidden, inner = SIZES_OF_EXPERTS[name]
    generator, pairs, rank = torch.Generator().manual_seed(5), {}, 2
    for kind, outputs, inputs in (
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ):
        a = torch.randn(number * rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, rank * number, generator=generator)
        layer = "feed_forward" if name == "llama 4" else "mlp"
        pairs[f"model.layers.1.{layer}.experts.{kind}"] = a, b
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = {
        "target_modules": [],
        "target_parameters": names,
        "rank_pattern": {names[0]: rank, names[1]: rank},
    }
    expected = logits(load(merged(tmp_path / "base", tmp_path / "merged", pairs, 4.0)), None, [-1])
    if is_swapped:
        if name == "gpt-oss":
            pytest.skip("its parameters have the inputs first in all releases")
        pairs = {key: swapped(a, b, number) for key, (a, b) in pairs.items()}
    tables = with_tables(model := load(tmp_path / "base"), ["experts"])
    [plain] = logits(model, tables, [-1])
    put(tables, 0, write_adapter(tmp_path / "adapter", pairs, **config))
    found = logits(model, tables, [0, -1])
    close(found[0], expected[0])
    close(found[1], plain)
    assert (found[0] - plain).abs().max() > 0.3


def swapped(a: torch.Tensor, b: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As releases of PEFT do that take the first dimension of `[E, N, K]` for the inputs."""
    by_expert = a.unflatten(0, (number, -1)), b.unflatten(1, (-1, number))
    return by_expert[1].permute(2, 1, 0).flatten(0, 1), by_expert[0].permute(2, 1, 0).flatten(1)


def test_rows_of_a_batch_have_each_its_own_adapter_or_none(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "Llama")
    tensors = load_file(tmp_path / "base/model.safetensors")
    one = random_pairs(linear_shapes(tensors, *ATTENTION, *MLP))
    two = random_pairs(linear_shapes(tensors, "q_proj", "v_proj"), rank=3, seed=1)
    tables = with_tables(model := load(tmp_path / "base"))
    [plain] = logits(model, tables, [-1])
    put(tables, 1, write_adapter(tmp_path / "one", one))
    put(tables, 0, write_adapter(tmp_path / "two", two, r=3, lora_alpha=1.5))
    found = logits(model, tables, [-1, 1, 0, 1])
    for slot, pairs, scale in ((1, one, 2.0), (0, two, 0.5)):
        folder = merged(tmp_path / "base", tmp_path / str(scale), pairs, scale)
        [expected] = logits(load(folder), None, [-1])
        close(found[[-1, 1, 0].index(slot)], expected)
    close(found[0], plain)
    assert torch.equal(found[1], found[3])
    put(tables, 1, tmp_path / "two")  # smaller than what the slot had
    close(logits(model, tables, [1])[0], found[2])
    with torch.inference_mode():
        tables.clear(1)
    assert torch.equal(logits(model, tables, [1])[0], plain)


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("name", ["deepseek v3", "qwen 3 next"])
def test_windows_have_the_adapters_of_prompts(
    name: str, is_invariant: bool, tmp_path: Path
) -> None:
    """Latent attention has another form for each."""
    family = FAMILIES[name]
    family.save(tmp_path / "base")
    shapes = linear_shapes(load_file(tmp_path / "base/model.safetensors"), *family.modules)
    model = load(tmp_path / "base", batch_invariant=is_invariant)
    put(tables := with_tables(model), 1, write_adapter(tmp_path / "adapter", random_pairs(shapes)))
    expected = logits(model, tables, [1, -1, 1], tokens=TOKENS[:12])
    runner = PagedRunner(model)
    if is_invariant:
        runner.use(partial(create_backend, BatchInvariantAttention))
    parts = []
    for first, in_windows in ((0, False), (5, True), (8, False)):
        own = dict.fromkeys(range(3), TOKENS[first : {0: 5, 5: 8, 8: 12}[first]])
        with torch.inference_mode():
            number = len(own[0])
            slots = torch.tensor([1, -1, 1], dtype=torch.int32).repeat_interleave(number)
            tables.rows.slots[: 3 * number] = slots
            tables.rows.begin(3 * number, None)
        found = runner.step(windows=own) if in_windows else runner.step(own)
        parts.append(list(found.values()))
    for request, whole in enumerate(expected):
        close(torch.cat([part[request] for part in parts]), whole)
    assert (expected[0] - expected[1]).abs().max() > 0.3


RANKED = ("llama", "llama, biases and one KV head", "deepseek v3, experts", "qwen 3 next")


@pytest.mark.parametrize(
    "name", [RANKED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in RANKED[1:])]
)
def test_two_ranks_with_slices_of_an_adapter_equal_one(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.save(tmp_path / "base")
    shapes = linear_shapes(load_file(tmp_path / "base/model.safetensors"), *family.modules)
    write_adapter(tmp_path / "adapter", random_pairs(shapes))

    def run(communicator: Communicator) -> torch.Tensor:
        model = load(tmp_path / "base", communicator=communicator)
        tables = with_tables(model, family.targets)
        put(tables, 1, tmp_path / "adapter")
        return torch.cat(logits(model, tables, [-1, 1], communicator.mapping))

    whole = run(SINGLE)
    assert (whole[: len(TOKENS)] - whole[len(TOKENS) :]).abs().max() > 0.1, "the adapter acts"
    close(torch.cat(ThreadGroup().run(run), 1), whole)


@torch.inference_mode()
def test_a_router_in_float32_has_adapters_of_16_bits_if_they_are_named(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "base", architecture="DeepseekV3")
    stored = load_file(tmp_path / "base/model.safetensors")
    [(name, shape), *_] = linear_shapes(stored, "mlp.gate").items()
    pairs = random_pairs({name: shape})
    folder = write_adapter(tmp_path / "adapter", pairs)
    with pytest.raises(ValueError, match="does not have 'gate', the router"):
        put(with_tables(load(tmp_path / "base")), 0, folder)
    model = load(tmp_path / "base", dtype=torch.bfloat16)
    put(tables := with_tables(model, ["gate"]), 1, folder)
    tables.rows.slots[:3] = torch.tensor([1, -1, 1])
    tables.rows.begin(3, None)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    router = model.get_submodule(name)
    assert isinstance(router, Router)
    found, (a, b) = router.logits(x), pairs[name]
    tables.rows.is_active = False
    plain = router.logits(x)
    added = x.float() @ a.bfloat16().float().t() @ (2 * b).bfloat16().float().t()
    assert found.dtype == torch.float32 and torch.equal(found[1], plain[1])
    torch.testing.assert_close((found - plain)[[0, 2]], added[[0, 2]], rtol=0.02, atol=0.05)


def test_rows_that_end_in_the_last_layer_leave_the_others_their_adapters(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", "Llama")
    shapes = linear_shapes(load_file(tmp_path / "base/model.safetensors"), *ATTENTION, *MLP)
    tables = with_tables(model := load(tmp_path / "base"))
    put(tables, 1, write_adapter(tmp_path / "adapter", random_pairs(shapes)))
    expected = torch.cat(logits(model, tables, [1, -1]))
    wanted = torch.tensor([3, len(TOKENS) - 1, len(TOKENS) + 5])
    runner = PagedRunner(model)
    metadata = runner.metadata({0: TOKENS, 1: TOKENS}, {}, 0)
    with torch.inference_mode():
        tables.rows.begin(2 * len(TOKENS), wanted)
        context = runner.context(metadata, wanted=wanted)
        hidden = model(torch.tensor(TOKENS * 2), metadata.positions, context)
        close(model.compute_logits(hidden), expected[wanted])


def quantised_folders(folder: Path, name: str) -> tuple[Path, Path]:
    """A quantised model, and the same values in float32."""
    experts = name.endswith("experts")
    wide = {"hidden_size": 128, "intermediate_size": 160} | EXPERTS
    save = tiny("Qwen3Moe" if experts else "Llama", **wide)
    style = Style("awq") if "int4" in name else Style("mxfp4")
    change = quantise_fp8 if "fp8" in name else partial(quantise, style=style)
    return quantised_pair(folder, save, change)


@pytest.mark.parametrize("name", ["int4", "fp8", "mxfp4", "fp8 experts", "int4 experts"])
def test_quantised_layers_add_adapters_of_the_models_type(name: str, tmp_path: Path) -> None:
    with keeping_fp8(), keeping_int4():
        base, plain = quantised_folders(tmp_path, name)
        modules = MLP if name.endswith("experts") else ATTENTION + MLP
        shapes = linear_shapes(load_file(plain / "model.safetensors"), *modules)
        pairs = random_pairs(shapes)
        tables = with_tables(model := load(base), ["experts", *modules])
        put(tables, 0, write_adapter(tmp_path / "adapter", pairs))
        found = logits(model, tables, [0, -1])
        close(found[1], logits(load(plain), None, [-1])[0])
        [expected] = logits(load(merged(plain, tmp_path / "merged", pairs, 2.0)), None, [-1])
        close(found[0], expected)


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_a_layers_few_rows_take_one_launch_more_for_each_projection(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the base fuses norm, SwiGLU and residual addition, its GEMM also expands."""
    with keeping_fp8(), keeping_int4():
        base, plain = quantised_folders(tmp_path, name)
        tensors = load_file(plain / "model.safetensors")
        pairs = random_pairs(linear_shapes(tensors, *ATTENTION, *MLP))
        tables = with_tables(model := load(base))
        put(tables, 0, write_adapter(tmp_path / "adapter", pairs))
        expected = logits(model, tables, [0, -1], tokens=TOKENS[:4])
        launched: list[str] = []

        def counting(name: str, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def call(*args: Any, **kwargs: Any) -> torch.Tensor:
                launched.append(name)
                return work(*args, **kwargs)

            return call

        monkeypatch.setattr(weight_format, "serves", lambda x, *weight: len(x) <= 8)
        gemm = counting("gemm", plain_small_m_gemm)
        monkeypatch.setattr(weight_format, "small_m_gemm", gemm)
        for each in ("shrink", "with_adapters"):
            work = getattr(adapted_layers, each)
            monkeypatch.setattr(adapted_layers, each, counting(each, work))
        found = logits(model, tables, [0, -1], tokens=TOKENS[:4])
        assert launched == ["shrink", "gemm"] * 4 * model.config.num_layers
        close(torch.cat(found), torch.cat(expected))
        assert (found[0] - found[1]).abs().max() > 0.3
        launched.clear()
        tables.rows.is_active = False
        assert torch.equal(logits(model, tables, [0, 0], tokens=TOKENS[:4])[1], found[1])
        assert launched == ["gemm"] * 4 * model.config.num_layers


STATIC = ("row", "deepseek", "autofp8 static")


@pytest.mark.parametrize("granularity", STATIC)
def test_experts_with_quantised_activations_are_the_same_before_swiglu_is_fused_and_after(
    granularity: str, tmp_path: Path
) -> None:
    """An adapter of zeros changes the order of the operations only."""
    with keeping_fp8():
        wide = EXPERTS | {"hidden_size": 128, "moe_intermediate_size": 128}
        tiny("Qwen3Moe", **wide)(tmp_path / "base")
        quantise_fp8(tmp_path / "base", granularity=granularity)
        shapes = linear_shapes(load_file(tmp_path / "base/model.safetensors"), *MLP)
        pairs = {name: (a, 0 * b) for name, (a, b) in random_pairs(shapes).items()}
        tables = with_tables(model := load(tmp_path / "base"), ["experts"])
        put(tables, 0, write_adapter(tmp_path / "adapter", pairs))
        found = logits(model, tables, [0])
        tables.rows.is_active = False
        fused = logits(model, tables, [0])[0]
        assert found[0].shape == fused.shape and fused.isfinite().all()
        close(found[0], fused)


def test_a_live_update_of_the_models_weights_passes_by_its_adapters(tmp_path: Path) -> None:
    save_deepseek(tmp_path / "base", "DeepseekV3")
    tensors = load_file(tmp_path / "base/model.safetensors")
    pairs = random_pairs(linear_shapes(tensors, *LATENT))
    other = random_pairs(linear_shapes(tensors, "o_proj", "up_proj", "kv_b_proj"), seed=7)
    folder = merged(tmp_path / "base", tmp_path / "other", other, 2.0)
    tables = with_tables(model := load(tmp_path / "base"))
    put(tables, 1, write_adapter(tmp_path / "adapter", pairs))
    with torch.inference_mode():
        for own, new in pairs_of(model, load(folder), "model", set()):
            own.copy_(new)
    fresh = with_tables(expected := load(folder))
    put(fresh, 1, tmp_path / "adapter")
    for found, own in zip(
        logits(model, tables, [1, -1]), logits(expected, fresh, [1, -1]), strict=True
    ):
        assert torch.equal(found, own)
