"""A mixture-of-experts layer: its forms of routing, of shared experts and of checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.helpers import CPU, load, save_checkpoint
from tllm_spec.distributed.communicator import SINGLE_RANK, Mapping
from tllm_spec.models.deepseek import DEEPSEEK_NAMES
from tllm_spec.models.layers import Placement, RMSNorm
from tllm_spec.models.llama import MIXTRAL_NAMES
from tllm_spec.models.llama4 import LLAMA4_NAMES
from tllm_spec.models.moe import Router, SparseMoE
from tllm_spec.models.moe_config import MoEConfig, MoENames
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.weights import fill_random, weight_table

HIDDEN = 32
PLACEMENT = Placement(torch.float32, CPU, SINGLE_RANK)
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": 8, "intermediate_size": 24}
CONFIGS = {
    "mixtral": MoEConfig(**SIZES, top_k=2, normalise_top_k=True, names=MIXTRAL_NAMES),
    "qwen2": MoEConfig(**SIZES, top_k=3, shared_intermediate_size=40, shared_gate=True),
    "qwen3.5": MoEConfig(
        **SIZES, top_k=3, normalise_top_k=True, shared_intermediate_size=24, shared_gate=True
    ),
    "v2": MoEConfig(
        **SIZES,
        top_k=3,
        routed_scaling_factor=4.0,
        num_groups=4,
        top_groups=2,
        shared_intermediate_size=48,
        names=DEEPSEEK_NAMES,
    ),
    "v3": MoEConfig(
        **SIZES,
        top_k=3,
        scoring="sigmoid",
        normalise_top_k=True,
        routed_scaling_factor=2.5,
        num_groups=2,
        top_groups=1,
        has_correction_bias=True,
        shared_intermediate_size=24,
        names=DEEPSEEK_NAMES,
    ),
    "llama4": MoEConfig(
        **SIZES,
        top_k=1,
        scoring="sigmoid",
        shared_intermediate_size=24,
        apply_weight_on_input=True,
        names=LLAMA4_NAMES,
    ),
}
on_each_config = pytest.mark.parametrize("name", CONFIGS)
Tensors = dict[str, torch.Tensor]


def filled(name: str, placement: Placement = PLACEMENT) -> tuple[SparseMoE, Tensors]:
    """A layer filled from random tensors with a checkpoint's names."""
    layer = SparseMoE(CONFIGS[name], placement)
    generator, tensors = torch.Generator().manual_seed(3), {}
    for key, slot in weight_table(layer).items():
        tensors[key] = torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5
        slot.load(tensors[key])
    return layer, tensors


class Given(RMSNorm):
    """Its output does not depend on its input."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__(HIDDEN, 1e-6, PLACEMENT)
        self._output = output

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._output


def output_of(layer: SparseMoE, x: torch.Tensor) -> torch.Tensor:
    """What the layer adds for the normed input x `[T, H]`."""
    hidden = torch.zeros_like(x)
    layer.add_to(hidden, Given(x))
    return hidden


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * gate.sigmoid() * up


def formula(name: str, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The layer from the checkpoint's tensors, with every expert computed for every token."""
    config = CONFIGS[name]
    tensors = {key.removeprefix("."): tensor for key, tensor in tensors.items()}
    names = config.names
    logits = x @ tensors[f"{names.router}.weight"].t()
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores + tensors.get(f"{names.router}.e_score_correction_bias", 0)
    groups = choice.unflatten(1, (config.num_groups, -1))
    best = groups.topk(2 if config.has_correction_bias else 1).values.sum(-1)
    edge = best.sort(descending=True).values[:, config.top_groups - 1, None]
    choice = groups.masked_fill((best < edge)[..., None], -torch.inf).flatten(1)
    taken = choice >= choice.sort(descending=True).values[:, config.top_k - 1, None]
    weights = scores * taken
    if config.normalise_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.routed_scaling_factor
    total = torch.zeros_like(x)
    for expert in range(config.num_experts):
        gate, up, down = expert_weights(names, tensors, expert)
        weight = weights[:, expert, None]
        own = x * weight if config.apply_weight_on_input else x
        output = swiglu(own @ gate.t(), own @ up.t()) @ down.t()
        total += output if config.apply_weight_on_input else output * weight
    if config.shared_intermediate_size:
        gate, up, down = (
            tensors[f"{names.shared}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        output = swiglu(x @ gate.t(), x @ up.t()) @ down.t()
        if config.shared_gate:
            output *= (x @ tensors[f"{names.shared_gate}.weight"].t()).sigmoid()
        total += output
    return total


def expert_weights(names: MoENames, tensors: Tensors, expert: int) -> list[torch.Tensor]:
    """Gate, up and down of an expert, `[out, in]`."""
    parts = (names.gate, names.up, names.down)
    return [tensors[f"experts.{expert}.{part}.weight"] for part in parts]


@on_each_config
def test_a_layer_equals_the_formula_on_the_checkpoints_tensors(name: str) -> None:
    layer, tensors = filled(name)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0)) * 2
    expected = formula(name, tensors, x)
    torch.testing.assert_close(output_of(layer, x), expected, rtol=0, atol=1e-5)
    assert output_of(layer, x[:0]).shape == (0, HIDDEN)


@on_each_config
def test_adding_to_the_residual_stream_norms_its_input(name: str) -> None:
    layer, tensors = filled(name)
    norm = RMSNorm(HIDDEN, 1e-6, PLACEMENT)
    norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3
    expected = hidden + formula(name, tensors, norm.forward(hidden))
    layer.add_to(hidden, norm)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@on_each_config
def test_ranks_slices_of_the_routed_experts_add_up_to_the_layer(name: str) -> None:
    config = CONFIGS[name]
    whole, tensors = filled(name)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    chosen, _ = whole.router.route(x)
    expected, total = (
        whole.experts.forward(x, whole.experts.sorted(x, chosen)),
        torch.zeros(4 * config.routing.num_taken, HIDDEN),
    )
    for rank in range(2):
        part = SparseMoE(config, Placement(torch.float32, CPU, Mapping(rank, 2, 2)))
        for key, slot in weight_table(part).items():
            assert slot.shape == tuple(tensors[key].shape)
            slot.load(tensors[key])
        total += part.experts.forward(x, part.experts.sorted(x, chosen))
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("float32_router", [False, True])
def test_a_16_bit_models_router_has_float32_logits_where_the_config_asks(
    float32_router: bool, batch_invariant: bool
) -> None:
    config = replace(CONFIGS["v3"], float32_router=float32_router)
    router = Router(config, Placement(torch.bfloat16, CPU, SINGLE_RANK, batch_invariant))
    generator = torch.Generator().manual_seed(0)
    router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    exact = x.double() @ router.weight.double().t()
    error = (router.logits(x).double() - exact).abs().max()
    assert (error < 1e-5) == float32_router and error < 0.2


def test_random_weights_depend_on_the_seed_only_and_keep_the_size_of_activations() -> None:
    first, second = (SparseMoE(CONFIGS["v3"], PLACEMENT) for _ in range(2))
    for layer in (first, second):
        fill_random(layer)
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert torch.equal(output_of(first, x), output_of(second, x))
    assert 0.3 < output_of(first, x).std() < 4


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("Mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
        ("Qwen2Moe", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("Qwen3Moe", "model.layers.1.mlp.experts.5.down_proj.weight"),
    ],
)
def test_missing_and_surplus_tensors_of_experts_are_named(
    architecture: str, missing: str, tmp_path: Path
) -> None:
    sizes = {} if architecture == "Mixtral" else {"num_experts": 8, "moe_intermediate_size": 24}
    save_checkpoint(tmp_path, architecture, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    surplus = missing.replace(".weight", ".scale")
    tensors[surplus] = tensors.pop(missing)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing {missing}; surplus {surplus}"):
        load(tmp_path)


def test_more_experts_per_token_than_experts_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Mixtral")
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_experts_per_tok": 9}
    with pytest.raises(ValueError, match=r"num_experts_per_tok is 9; accepted is 1 to .* 8"):
        model_config_of(raw)


def test_an_expert_layer_counts_each_experts_output_as_activations() -> None:
    config = CONFIGS["qwen2"]
    assert config.row_elements == 3 * (24 + HIDDEN) + 3 * 40
    config = CONFIGS["v3"]  # whose shared expert is one more
    assert config.row_elements == 4 * (24 + HIDDEN)


@pytest.mark.thinned(3)
@on_each_config
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_the_parts_of_four_ranks_sum_to_the_layer(name: str, ep_size: int) -> None:
    whole, tensors = filled(name)
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = output_of(whole, hidden)
    total = torch.zeros_like(expected)
    for rank in range(4):
        config = CONFIGS[name]
        mapping = Mapping(rank, 4, 4, ep_size)
        part = SparseMoE(config, Placement(torch.float32, CPU, mapping))
        for path, slot in weight_table(part).items():
            slot.load(tensors[path])
        total += output_of(part, hidden)  # the communicator of one process adds its part only
    torch.testing.assert_close(total, expected)
