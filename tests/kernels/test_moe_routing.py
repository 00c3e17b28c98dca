"""The experts and weights that a router chooses, against its reference and the published rules."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.routing import RoutingRule, moe_routing

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
        scores = (row.softmax(0) if rule.scoring == "softmax" else row.sigmoid()).tolist()
        choice = [s + (0 if bias is None else bias[e].item()) for e, s in enumerate(scores)]
        size, best = len(scores) // rule.num_groups, 1 if bias is None else 2
        groups = [choice[start : start + size] for start in range(0, len(choice), size)]
        group_scores = [sum(sorted(group)[-best:]) for group in groups]
        kept = sorted(range(len(groups)), key=lambda g: -group_scores[g])[: rule.top_groups]
        among = [e for e in range(len(scores)) if rule.num_groups == 1 or e // size in kept]
        expected = sorted(among, key=lambda e: -choice[e])[: rule.top_k]
        total = sum(scores[e] for e in expected) if rule.normalises else 1.0
        values = [scores[e] / total * rule.scale for e in expected] + [1.0] * rule.num_shared
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
