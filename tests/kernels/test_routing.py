"""The experts that a router chooses, assignments sorted by expert with their blocks, and the
weighted sum over a token's experts."""

from typing import Any

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import (
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_with_the_compiler,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.permute import ExpertRows, max_blocks, moe_permute
from tllm_spec.kernels.experts.routing import OwnExperts, RoutingRule, moe_combine, moe_routing

# Experts, rule, whether there is a correction bias: Qwen3-MoE, Qwen2-MoE, Mixtral, Llama 4,
# DeepSeek V2-Lite, V2 and V3.
RULES = {
    "qwen3": (128, RoutingRule(8, "softmax", normalises=True), False),
    "qwen2": (60, RoutingRule(4, "softmax"), False),
    "mixtral": (8, RoutingRule(2, "softmax", normalises=True), False),
    "llama4": (16, RoutingRule(1, "sigmoid"), False),
    "v2 lite": (64, RoutingRule(6, "softmax"), False),
    "v2": (160, RoutingRule(6, "softmax", scale=16.0, num_groups=8, top_groups=3), False),
    "v3": (256, RoutingRule(8, "sigmoid", True, 2.5, num_groups=8, top_groups=4), True),
    "v3, one group": (24, RoutingRule(3, "sigmoid", True, 2.0), True),
    "v3, shared": (64, RoutingRule(8, "sigmoid", True, 2.5, 8, 4, num_shared=1), True),
    "gated": (61, RoutingRule(8, "softmax", True, num_shared=1, gates_shared=True), False),
    "two shared": (12, RoutingRule(2, "softmax", num_shared=2), False),
    "all experts": (5, RoutingRule(5, "softmax", normalises=True), False),
}
on_each_rule = pytest.mark.parametrize("name", RULES)


def problem(
    name: str, num_rows: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, RoutingRule, torch.Tensor | None]:
    num_experts, rule, has_bias = RULES[name]
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, num_experts, generator=generator).to(device, dtype)
    bias = torch.randn(num_experts, generator=generator).to(device) * 0.3 if has_bias else None
    return logits, rule, bias


@on_each_rule
def test_the_reference_follows_the_published_rule(name: str) -> None:
    """Row by row, with sorting in Python."""
    logits, rule, bias = problem(name, 5, torch.float32)
    experts, weights = moe_routing.reference(logits, rule, bias)
    for row, ids, found in zip(logits, experts.tolist(), weights.tolist(), strict=True):
        shared = [1.0] * rule.num_shared
        if rule.gates_shared:
            shared, row = [row[-1].sigmoid().item()], row[:-1]
        scores = (row.softmax(0) if rule.scoring == "softmax" else row.sigmoid()).tolist()
        choice = [s + (0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        size, best = len(scores) // rule.num_groups, 1 if bias is None else 2
        groups = [choice[start : start + size] for start in range(0, len(choice), size)]
        group_scores = [sum(sorted(group)[-best:]) for group in groups]
        kept = sorted(range(len(groups)), key=lambda g: -group_scores[g])[: rule.top_groups]
        among = [e for e in range(len(scores)) if rule.num_groups == 1 or e // size in kept]
        expected = sorted(among, key=lambda e: -choice[e])[: rule.top_k]
        total = sum(scores[e] for e in expected) if rule.normalises else 1.0
        values = [scores[e] / total * rule.scale for e in expected] + shared
        assert ids == expected + [len(scores) + i for i in range(rule.num_shared)]
        assert found == pytest.approx(values, rel=1e-5)


@on_each_kernel_device
@on_each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_chooses_the_references_experts(
    name: str, dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_rows in (0, 1, 7):
        logits, rule, bias = problem(name, num_rows, dtype, device)
        experts, weights = moe_routing(logits, rule, bias)
        expected, expected_weights = moe_routing.reference(logits, rule, bias)
        assert torch.equal(experts, expected) and experts.dtype == torch.int32
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@on_each_kernel_device
@on_each_rule
def test_weights_of_routed_experts_have_factors(name: str, device: str) -> None:
    logits, rule, bias = problem(name, 3, torch.float32, device)
    factors = torch.linspace(0.5, 2.0, RULES[name][0], device=device)
    experts, plain = moe_routing(logits, rule, bias)
    routed = experts[:, : rule.top_k].long()
    expected = plain.clone()
    expected[:, : rule.top_k] *= factors[routed]
    for route in (moe_routing, moe_routing.reference):
        found = route(logits, rule, bias, factors)
        assert torch.equal(found[0], experts)
        torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-7)


@on_each_kernel_device
def test_of_equal_scores_the_lower_index_is_better(device: str) -> None:
    logits = torch.zeros(2, 12, device=device)
    logits[1, [3, 9]] = 1.0
    experts, _ = moe_routing(logits, RoutingRule(4, "softmax"))
    assert experts.tolist() == [[0, 1, 2, 3], [3, 9, 0, 1]]


@on_each_kernel_device
@pytest.mark.parametrize("name", ["qwen3", "v3"])
def test_logits_that_are_not_numbers_choose_real_experts(name: str, device: str) -> None:
    """Another index would make the GEMM read outside the weights."""
    logits, rule, bias = problem(name, 3, torch.float32, device)
    logits[0], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    experts, _ = moe_routing(logits, rule, bias)
    assert experts.min() >= 0 and experts.max() < logits.shape[1]


# Tokens, experts per token, experts, block size, and experts that tokens really take.
CASES = [(1, 8, 64, 16, 64), (5, 2, 8, 4, 8), (33, 4, 60, 16, 60), (64, 8, 128, 16, 128),
         (40, 8, 64, 16, 8), (700, 8, 16, 128, 3), (3, 1, 16, 16, 1), (0, 2, 8, 16, 8),
         (512, 8, 20, 16, 20), (1500, 4, 60, 64, 60)]  # fmt: skip
on_each_case = pytest.mark.parametrize("case", CASES, ids=str)


def chosen(case: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """Different experts for every token, `[T, k]`."""
    num_tokens, top_k, num_experts, _, num_hit = case
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randperm(num_experts, generator=generator)[:num_hit]
    rows = [torch.randperm(num_hit, generator=generator)[:top_k] for _ in range(num_tokens)]
    picks = torch.stack(rows) if rows else torch.empty(0, top_k, dtype=torch.int64)
    return ids[picks % num_hit].to(device, torch.int32)


def check(rows: ExpertRows, experts: torch.Tensor, num_experts: int) -> None:
    flat = experts.flatten().tolist()
    assert rows.order.tolist() == sorted(range(len(flat)), key=lambda a: flat[a])
    ordered = [flat[a] for a in rows.order.tolist()]
    expected = []
    for expert in sorted(set(flat)):
        first, number = ordered.index(expert), ordered.count(expert)
        starts = range(first, first + number, rows.block_rows)
        expected += [[expert, start, first + number] for start in starts]
    number = int(rows.num_blocks)
    assert rows.blocks[:, :number].t().tolist() == expected
    assert number <= rows.blocks.shape[1] == max_blocks(len(flat), num_experts, rows.block_rows)


@on_each_case
def test_the_reference_sorts_stably_and_cuts_blocks(case: tuple[int, ...]) -> None:
    experts = chosen(case)
    check(moe_permute.reference(experts, case[2], case[3]), experts, case[2])


@on_each_kernel_device
@on_each_case
def test_the_kernel_sorts_stably_and_cuts_blocks(case: tuple[int, ...], device: str) -> None:
    assert has_kernels(torch.device(device))
    experts = chosen(case, device)
    check(moe_permute(experts, case[2], case[3]), experts, case[2])


@on_each_kernel_device
@pytest.mark.parametrize("case", CASES[1:5] + CASES[-1:], ids=str)
def test_experts_of_other_ranks_come_last_in_no_block(case: tuple[int, ...], device: str) -> None:
    experts, (first, number) = chosen(case, device), (case[2] // 4, case[2] // 2)
    for permute in (moe_permute, moe_permute.reference):
        rows = permute(experts, number, case[3], first)
        own = experts.flatten() - first
        own = own.where((own >= 0) & (own < number), number).cpu()
        assert torch.equal(rows.order.long().cpu(), own.argsort(stable=True))
        expected = moe_permute.reference(own[own < number].int().view(-1, 1), number, case[3])
        num_blocks = int(rows.num_blocks)
        assert num_blocks == int(expected.num_blocks) > 0
        assert torch.equal(rows.blocks[:, :num_blocks].cpu(), expected.blocks[:, :num_blocks])


@only_with_the_compiler
@pytest.mark.parametrize("first", [None, 4])
def test_the_kernel_compiles_with_and_without_experts_of_other_ranks(first: int | None) -> None:
    from tllm_spec.kernels.experts.permute import moe_permute_kernel

    types = dict.fromkeys(("experts", "order", "blocks", "num_blocks"), "*i32")
    own: dict[str, Any] = {"FIRST": first, "NUMBER": 8, "BINS": 32, "totals": None, "PDL": True}
    sizes = {"BLOCK_ROWS": 16, "BLOCK": 128, "BLOCKS": 64}
    code = compiled_for_hopper(moe_permute_kernel, types, own | sizes, num_warps=1)
    assert "atom" in code.asm["ptx"]


@pytest.mark.gpu
def test_a_captured_graph_sorts_what_is_there_at_replay() -> None:
    case = (64, 8, 128, 16, 128)
    static = chosen(case, "cuda")
    graph, rows = captured_graph(lambda: moe_permute(static, 128, 16))
    for num_hit in (128, 8, 31):
        static.copy_(chosen((*case[:4], num_hit)))
        graph.replay()
        check(rows, static, 128)


COMBINE_CASES = [
    (1, 8, 2048),
    (5, 2, 64),
    (3, 1, 1030),
    (0, 4, 32),
    (7, 6, 100),
]  # tokens, k, columns
combine_on_each_case = pytest.mark.parametrize("case", COMBINE_CASES, ids=str)
on_each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def combine_problem(
    case: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the experts, weights, residual stream."""
    (num_tokens, top_k, size), generator = case, torch.Generator().manual_seed(0)
    parts = torch.randn(num_tokens * top_k, size, generator=generator).to(device, dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
    return parts, weights, torch.randn(num_tokens, size, generator=generator).to(device, dtype)


@combine_on_each_case
@on_each_dtype
def test_the_reference_equals_the_formula(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    parts, weights, residual = combine_problem(case, dtype, "cpu")
    by_token = parts.view(case).double()
    expected = (by_token * weights[..., None].double()).sum(1) + residual.double()
    found = moe_combine.reference(parts, weights, case[1], residual)
    assert found is residual
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else ROUNDING[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2e-6)
    unweighted = moe_combine.reference(parts, None, case[1])
    torch.testing.assert_close(unweighted.double(), by_token.sum(1), rtol=tolerance, atol=2e-6)


@on_each_kernel_device
@combine_on_each_case
@on_each_dtype
def test_the_kernel_equals_its_reference(
    case: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    parts, weights, residual = combine_problem(case, dtype, device)
    for own_weights in (weights, None):
        expected = moe_combine.reference(parts, own_weights, case[1])
        check_like_the_reference(moe_combine(parts, own_weights, case[1]), expected)
    expected = moe_combine.reference(parts, weights, case[1], residual.clone())
    assert moe_combine(parts, weights, case[1], residual) is residual
    check_like_the_reference(residual, expected)


@on_each_kernel_device
def test_outputs_of_other_ranks_experts_are_not_read(device: str) -> None:
    """They are NaN."""
    parts, weights, residual = combine_problem((9, 4, 130), torch.float32, device)
    experts = torch.arange(36, dtype=torch.int32, device=device).view(9, 4) % 8
    is_own = (experts >= 2) & (experts < 5)
    expected = moe_combine.reference(parts, weights * is_own, 4, residual.clone())
    parts[~is_own.flatten()] = torch.nan
    own = OwnExperts(experts, 2, 3)
    for combine in (moe_combine, moe_combine.reference):
        found = combine(parts, weights, 4, residual.clone(), own)
        torch.testing.assert_close(found, expected)
