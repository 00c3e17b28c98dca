"""The Triton kernel of moe_routing.py, which describes inputs and outputs. Importing this file
imports Triton.

It takes the reference's steps in float32, but sums the exponentials in another order."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.moe_routing import EPSILON, RoutingRule
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_ELEMENTS_PER_WARP = 512


def moe_routing_triton(
    logits: torch.Tensor, rule: RoutingRule, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moe_routing`."""
    (num_rows, num_experts), size = logits.shape, logits.shape[1] // rule.num_groups
    assert logits.is_contiguous() and num_experts == size * rule.num_groups
    experts = logits.new_empty(num_rows, rule.num_taken, dtype=torch.int32)
    weights = logits.new_empty(num_rows, rule.num_taken, dtype=torch.float32)
    if not num_rows:
        return experts, weights
    groups, members = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
    moe_routing_kernel[(num_rows,)](
        logits,
        correction_bias,
        experts,
        weights,
        rule.scale,
        EPSILON=EPSILON,
        SOFTMAX=rule.scoring == "softmax",
        NORMALISES=rule.normalises,
        TOP_K=rule.top_k,
        TAKEN=rule.num_taken,
        TAKEN_PADDED=triton.next_power_of_2(rule.num_taken),
        NUM_GROUPS=rule.num_groups,
        GROUP_SIZE=size,
        TOP_GROUPS=rule.top_groups,
        GROUPS=groups,
        MEMBERS=members,
        num_warps=max(1, min(groups * members // _ELEMENTS_PER_WARP, 8)),
        **programmatic_launch(logits.device),
    )
    return experts, weights


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _without_nan(values: tl.tensor) -> tl.tensor:
    """NaN would make the index of the best one undefined."""
    return tl.where(values == values, values, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scores(logit: tl.tensor, SOFTMAX: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    if SOFTMAX:
        powers = tl.exp(logit - tl.max(tl.reshape(logit, [SIZE]), 0))
        scores = powers / tl.sum(tl.reshape(powers, [SIZE]), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    return scores


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _outside_best_groups(
    choice: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
) -> tl.tensor:
    """`[GROUPS]`: whether a group of `choice` `[GROUPS, MEMBERS]` is not among the best."""
    groups, members = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    scores, best = tl.max(choice, 1, return_indices=True)
    if SUMS_TWO:
        scores += tl.max(tl.where(members[None, :] == best[:, None], float("-inf"), choice), 1)
    scores = tl.where(groups < NUM_GROUPS, scores, float("-inf"))
    outside = groups >= 0
    for _ in tl.static_range(TOP_GROUPS):
        taken = groups == tl.argmax(scores, 0)
        outside = outside & (taken == 0)
        scores = tl.where(taken, float("-inf"), scores)
    return outside


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def moe_routing_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    EPSILON: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISES: tl.constexpr,
    TOP_K: tl.constexpr,
    TAKEN: tl.constexpr,
    TAKEN_PADDED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row per program, as `[GROUPS, MEMBERS]`, padded to powers of 2."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS)[:, None], tl.arange(0, MEMBERS)[None, :]
    ids = groups * GROUP_SIZE + members
    real = (groups < NUM_GROUPS) & (members < GROUP_SIZE)
    logit = tl.load(
        logits + row * (NUM_GROUPS * GROUP_SIZE) + ids, mask=real, other=float("-inf")
    ).to(tl.float32)
    scores = _scores(logit, SOFTMAX, GROUPS * MEMBERS)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + ids, mask=real, other=0.0)
    choice = tl.where(real, _without_nan(choice), float("-inf"))
    if NUM_GROUPS > 1:
        outside = _outside_best_groups(
            choice, NUM_GROUPS, TOP_GROUPS, GROUPS, MEMBERS, bias is not None
        )
        choice = tl.where(outside[:, None], float("-inf"), choice)

    left, flat_scores = (
        tl.reshape(choice, [GROUPS * MEMBERS]),
        tl.reshape(scores, [GROUPS * MEMBERS]),
    )
    flat_ids, places = tl.arange(0, GROUPS * MEMBERS), tl.arange(0, TAKEN_PADDED)
    chosen, found = tl.zeros([TAKEN_PADDED], tl.int32), tl.zeros([TAKEN_PADDED], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        score = tl.sum(tl.where(flat_ids == best, flat_scores, 0.0), 0)
        expert = best // MEMBERS * GROUP_SIZE + best % MEMBERS
        chosen = tl.where(places == place, expert, chosen)
        found = tl.where(places == place, score, found)
        left = tl.where(flat_ids == best, float("-inf"), left)
    if NORMALISES:
        found = found / (tl.sum(found, 0) + EPSILON)
    is_shared = places >= TOP_K
    chosen = tl.where(is_shared, NUM_GROUPS * GROUP_SIZE + places - TOP_K, chosen)
    found = tl.where(is_shared, 1.0, found * scale)
    tl.store(experts + row * TAKEN + places, chosen, mask=places < TAKEN)
    tl.store(weights + row * TAKEN + places, found, mask=places < TAKEN)
