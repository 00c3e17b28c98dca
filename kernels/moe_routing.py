"""The router of a mixture of experts: scores of all experts to the top-k experts of every token and
their weights. A Triton kernel if Triton is available, otherwise the plain-torch reference, which is
the definition."""

from dataclasses import dataclass
from typing import Literal

import torch

from tllm_spec.kernels.dispatch import with_kernel

Scoring = Literal["softmax", "sigmoid"]
# Added to the sum that normalises, as DeepSeek V3 does.
EPSILON = 1e-20


@dataclass(frozen=True)
class RoutingRule:
    """How scores become experts and weights."""

    top_k: int
    scoring: Scoring
    normalises: bool = False
    """Whether a token's weights sum to `scale`."""
    scale: float = 1.0
    num_groups: int = 1
    """Groups of adjacent experts, all of the same size."""
    top_groups: int = 1
    """Groups that a token may take experts from: those with the best score (arXiv 2405.04434,
    section 2.2.2). It is the best expert's, or with a correction bias the sum of the best two
    (DeepSeek V3's published code)."""
    num_shared: int = 0
    """Experts with the indices after the routed ones, which every token takes with weight 1."""

    @property
    def num_taken(self) -> int:
        """Experts per token."""
        return self.top_k + self.num_shared


@with_kernel("moe_routing_triton.moe_routing_triton")
def moe_routing(
    logits: torch.Tensor, rule: RoutingRule, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts `[T, k]` int32, best first and then the shared ones, and their weights `[T, k]`
    float32. Of equal scores the expert with the lower index is better.

    Args:
        logits: `[T, E]`, contiguous.
        rule: how to choose.
        correction_bias: `[E]` float32, added to the scores for the choice only.
    """
    scores = logits.float()
    scores = scores.softmax(-1) if rule.scoring == "softmax" else scores.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if rule.num_groups > 1:
        choice = _within_best_groups(choice, rule, 1 if correction_bias is None else 2)
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : rule.top_k]
    weights = scores.gather(-1, experts)
    if rule.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    weights = weights * rule.scale
    if rule.num_shared:
        shared = torch.arange(rule.num_shared, device=logits.device) + logits.shape[1]
        experts = torch.cat((experts, shared.expand(len(experts), -1)), 1)
        weights = torch.cat((weights, weights.new_ones(len(weights), rule.num_shared)), 1)
    return experts.to(torch.int32), weights


def _within_best_groups(choice: torch.Tensor, rule: RoutingRule, num_best: int) -> torch.Tensor:
    """`choice` with minus infinity outside the best groups; a group's score is the sum of its
    `num_best` best experts."""
    size = choice.shape[1] // rule.num_groups
    groups = choice.view(-1, rule.num_groups, size)
    scores = groups.topk(num_best, -1).values.sum(-1)
    best = scores.argsort(dim=-1, descending=True, stable=True)[:, : rule.top_groups]
    outside = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(outside[..., None], float("-inf")).view(choice.shape)
