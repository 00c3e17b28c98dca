"""What precedes the experts' GEMMs, of up to 8 tokens, in one launch, next to its reference, to the
kernels of many tokens, and with the same bits for a token in every batch."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_grouped_gemm import Problem, Shape, problem
from tllm_spec.distributed.communicator import SINGLE_RANK, Mapping
from tllm_spec.kernels.experts.few_tokens import MAX_TOKENS, RouterWeights, route_few
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.experts.routing import RoutingRule
from tllm_spec.kernels.gemm.norms import NormWeight
from tllm_spec.models import moe
from tllm_spec.models.layers import Placement, RMSNorm
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.models.weights import fill_random

HIDDEN = 96
# Experts, rule, whether there are biases: of the logits, and of the choice.
RULES: dict[str, tuple[int, RoutingRule, bool, bool]] = {
    "qwen3": (12, RoutingRule(4, "softmax", normalises=True), False, False),
    "v3": (16, RoutingRule(3, "sigmoid", True, 2.5, 4, 2, num_shared=1), False, True),
    "gpt-oss": (6, RoutingRule(2, "softmax", normalises=True), True, False),
    "qwen3.5": (11, RoutingRule(3, "softmax", True, num_shared=1, gates_shared=True), False, False),
}
on_each_rule = pytest.mark.parametrize("name", RULES)


def given(
    name: str, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, NormWeight, RouterWeights]:
    """MAX_TOKENS tokens."""
    number, rule, has_bias, corrects = RULES[name]
    generator = torch.Generator().manual_seed(number)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    correction = normal(number) * 0.3 if corrects else None
    weight, bias = normal(number, HIDDEN).to(dtype), normal(number).to(dtype)
    counters = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)
    own = weight, bias if has_bias else None, correction, rule, torch.float32, counters
    norm = NormWeight(normal(HIDDEN).to(dtype), 1e-6)
    further = ()
    if name == "qwen3":
        further = normal(number).abs(), NormWeight(normal(HIDDEN).to(dtype), 1e-5)
    return normal(MAX_TOKENS, HIDDEN).to(dtype), norm, RouterWeights(*own, *further)


@on_each_kernel_device
@on_each_rule
def test_the_kernel_equals_its_reference(name: str, device: str) -> None:
    hidden, norm, router = given(name, device)
    for number in (1, MAX_TOKENS):
        found, expected = (call(hidden[:number], norm, router) for call in OPERATIONS)
        torch.testing.assert_close(found.x, expected.x)
        assert torch.equal(found.rows.experts, expected.rows.experts)
        torch.testing.assert_close(found.weights, expected.weights)
        for rows in (found.rows, expected.rows):
            places, number = list(range(rows.experts.numel())), int(rows.num_blocks)
            assert rows.order.tolist() == places and number == len(places) == rows.blocks.shape[1]
            ends = [place + 1 for place in places]
            assert rows.blocks.tolist() == [rows.experts.flatten().tolist(), places, ends]
        assert not router.num_arrived.any()


OPERATIONS = route_few, route_few.reference


@on_each_kernel_device
@on_each_rule
def test_a_token_is_routed_with_the_same_bits_alone_and_among_others(
    name: str, device: str
) -> None:
    hidden, norm, router = given(name, device, torch.bfloat16)
    many = route_few(hidden, norm, router)
    for token in range(MAX_TOKENS):
        alone = route_few(hidden[token : token + 1], norm, router)
        for own, others in (
            (alone.x, many.x),
            (alone.weights, many.weights),
            (alone.rows.experts, many.rows.experts),
        ):
            assert torch.equal(own[0], others[token])


@pytest.mark.interpreted("form", "plain", "block")
@on_each_kernel_device
@pytest.mark.parametrize("form", ["plain", "fp8", "token", "block", "int4 32", "mxfp4 32"])
def test_the_rows_of_one_token_give_the_bits_of_sorted_ones(form: str, device: str) -> None:
    """And what follows from their places is not read, but by the CUDA kernel of MXFP4."""
    p = problem(form, Shape(8, 3, 160, 96), 1, torch.bfloat16, device)
    inner = p.inner()
    order, expected = p.rows.order.long(), p.output(inner)
    blocks = torch.full((3, 3), -99, dtype=torch.int32, device=device)
    blocks[0] = p.experts
    if form.startswith("mxfp4"):
        blocks[1] = torch.arange(3)
        blocks[2] = blocks[1] + 1
    number = blocks[2, -1:] if form.startswith("mxfp4") else blocks[2, :1]
    rows = ExpertRows(blocks[1], blocks, number, 16, 3, p.experts, is_sorted=False)
    with mock.patch.object(Problem, "rows", rows):
        found = p.inner()
        assert torch.equal(found[order], inner) and torch.equal(p.output(found), expected)


SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": 8, "intermediate_size": 64}
CONFIGS = {
    "qwen3": MoEConfig(**SIZES, top_k=3, normalise_top_k=True),
    "qwen2": MoEConfig(**SIZES, top_k=3, shared_intermediate_size=40, shared_gate=True),
    "qwen3.5": MoEConfig(
        **SIZES, top_k=3, normalise_top_k=True, shared_intermediate_size=64, shared_gate=True
    ),
    "v3": MoEConfig(
        **SIZES, top_k=3, scoring="sigmoid", normalise_top_k=True, num_groups=2,
        has_correction_bias=True, shared_intermediate_size=64, float32_router=True,
    ),
    "llama4": MoEConfig(**SIZES, top_k=1, scoring="sigmoid", apply_weight_on_input=True),
    "gpt-oss": MoEConfig(**SIZES, top_k=2, has_bias=True, swiglu_limit=7.0),
}  # fmt: skip


def layer_of(config: MoEConfig, placement: Placement) -> tuple[SparseMoE, RMSNorm]:
    layer, norm = SparseMoE(config, placement), RMSNorm(HIDDEN, 1e-6, placement)
    fill_random(layer)
    norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
    return layer, norm


@on_each_kernel_device
@pytest.mark.interpreted("name", "v3", "llama4", "gpt-oss")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_of_few_tokens_adds_what_it_adds_of_many(name: str, device: str) -> None:
    placement = Placement(torch.float32, torch.device(device), SINGLE_RANK)
    layer, norm = layer_of(CONFIGS[name], placement)
    hidden = torch.randn(MAX_TOKENS + 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    many = hidden.to(device)
    few, alone = many[:MAX_TOKENS].clone(), many[:1].clone()
    with mock.patch.object(moe, "route_few", mock.Mock(wraps=route_few)) as routed:
        for tokens in (many, few, alone):
            layer.add_to(tokens, norm)
    assert routed.call_count == 2
    torch.testing.assert_close(few, many[:MAX_TOKENS], rtol=1e-4, atol=1e-5)
    assert layer.shared is not None or torch.equal(alone, few[:1])


@on_each_kernel_device
def test_another_ranks_experts_are_left_out(device: str) -> None:
    placement = Placement(torch.float32, torch.device(device), SINGLE_RANK)
    whole, norm = layer_of(CONFIGS["qwen3"], placement)
    expected, total = torch.zeros(2, 1, HIDDEN, device=device)
    hidden = torch.randn(1, HIDDEN, device=device)
    whole.add_to(expected.copy_(hidden), norm)
    for rank in range(2):
        own = replace(placement, mapping=Mapping(rank, 2, 2, 2))
        part, _ = layer_of(CONFIGS["qwen3"], own)
        for mine, other in zip(part.experts.parameters(), whole.experts.parameters(), strict=True):
            mine.copy_(other[4 * rank : 4 * rank + 4])
        part.router.weight.copy_(whole.router.weight)
        one = hidden.clone()
        part.add_to(one, norm)  # the communicator of one process adds its part only
        total += one - hidden
    torch.testing.assert_close(total + hidden, expected, rtol=1e-4, atol=1e-5)


@on_each_kernel_device
def test_a_batch_invariant_layer_takes_the_kernels_of_many(device: str) -> None:
    placement = Placement(torch.float32, torch.device(device), SINGLE_RANK, batch_invariant=True)
    layer, norm = layer_of(CONFIGS["qwen3"], placement)
    with mock.patch.object(moe, "route_few") as routed:
        layer.add_to(torch.randn(2, HIDDEN, device=device), norm)
    assert routed.call_count == 0
