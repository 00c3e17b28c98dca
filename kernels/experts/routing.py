"""A mixture of experts around its GEMMs: the router's scores become the top-k experts of every
token and their weights, and the experts' outputs are summed with them."""

from dataclasses import dataclass
from typing import Literal

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

# The router of a mixture of experts: scores of all experts to the top-k experts of every token and
# their weights. A Triton kernel if Triton is available, otherwise the plain-torch reference, which
# is the definition.


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
    gates_shared: bool = False
    """Whether the shared expert's weight is the sigmoid of one more logit, the last of a row."""

    @property
    def num_taken(self) -> int:
        """Experts per token."""
        return self.top_k + self.num_shared


@with_kernel("moe_routing_triton")
def moe_routing(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction_bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts `[T, k]` int32, best first and then the shared ones, and their weights `[T, k]`
    float32. Of equal scores the expert with the lower index is better.

    Args:
        logits: `[T, E]`, contiguous; `[T, E + 1]` if the rule gates the shared expert.
        rule: how to choose.
        correction_bias: `[E]` float32, added to the scores for the choice only.
        factors: `[E]`, of the finished weights of routed experts.
    """
    scores, gates = logits.float(), None
    if rule.gates_shared:
        scores, gates = scores[:, :-1], scores[:, -1:].sigmoid()
    scores = scores.softmax(-1) if rule.scoring == "softmax" else scores.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if rule.num_groups > 1:
        choice = _within_best_groups(choice, rule, 1 if correction_bias is None else 2)
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : rule.top_k]
    weights = scores.gather(-1, experts)
    if rule.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    weights = weights * rule.scale
    if factors is not None:
        weights = weights * factors.float()[experts]
    if rule.num_shared:
        shared = torch.arange(rule.num_shared, device=logits.device) + scores.shape[1]
        experts = torch.cat((experts, shared.expand(len(experts), -1)), 1)
        ones = weights.new_ones(len(weights), rule.num_shared)
        weights = torch.cat((weights, ones if gates is None else gates), 1)
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


# It takes the reference's steps in float32, but sums the exponentials in another order.


_ELEMENTS_PER_WARP = 512


def moe_routing_triton(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction_bias: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moe_routing`."""
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous()
    experts = logits.new_empty(num_rows, rule.num_taken, dtype=torch.int32)
    weights = logits.new_empty(num_rows, rule.num_taken, dtype=torch.float32)
    if not num_rows:
        return experts, weights
    options = routing_options(rule, num_experts - rule.gates_shared)
    elements = options["GROUPS"] * options["MEMBERS"]
    moe_routing_kernel[(num_rows,)](
        logits,
        correction_bias,
        factors,
        experts,
        weights,
        rule.scale,
        num_warps=max(1, min(elements // _ELEMENTS_PER_WARP, 8)),
        **options,
        **programmatic_launch(logits.device),
    )
    return experts, weights


def routing_options(rule: RoutingRule, num_experts: int) -> dict[str, int | float]:
    """Constants of kernels that choose among `num_experts`."""
    size = num_experts // rule.num_groups
    assert num_experts == size * rule.num_groups
    return {
        "EPSILON": EPSILON,
        "SOFTMAX": rule.scoring == "softmax",
        "NORMALISES": rule.normalises,
        "TOP_K": rule.top_k,
        "TAKEN": rule.num_taken,
        "TAKEN_PADDED": triton.next_power_of_2(rule.num_taken),
        "GATED": rule.gates_shared,
        "NUM_GROUPS": rule.num_groups,
        "GROUP_SIZE": size,
        "TOP_GROUPS": rule.top_groups,
        "GROUPS": triton.next_power_of_2(rule.num_groups),
        "MEMBERS": triton.next_power_of_2(size),
    }


@triton.jit
def _without_nan(values: tl.tensor) -> tl.tensor:
    """NaN would make the index of the best one undefined."""
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _scores(logit: tl.tensor, SOFTMAX: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    if SOFTMAX:
        powers = tl.exp(logit - tl.max(tl.reshape(logit, [SIZE]), 0))
        scores = powers / tl.sum(tl.reshape(powers, [SIZE]), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    return scores


@triton.jit
def _outside_best_groups(
    choice: tl.tensor, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr, SUMS_TWO: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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


@triton.jit
def _keys(choice: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """int64 `[SIZE]`, in the order of `choice`, and of equal ones against that of the index."""
    bits = choice.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) + (SIZE - 1 - tl.arange(0, SIZE))


@triton.jit
def choose_experts(
    row: tl.tensor, logits: tl.tensor, bias: tl.tensor, factors: tl.tensor, experts: tl.tensor,
    weights: tl.tensor, scale: tl.tensor, EPSILON: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALISES: tl.constexpr, TOP_K: tl.constexpr, TAKEN: tl.constexpr, TAKEN_PADDED: tl.constexpr,
    GATED: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """For one row of the logits, as `[GROUPS, MEMBERS]`, padded to powers of 2."""
    groups, members = tl.arange(0, GROUPS)[:, None], tl.arange(0, MEMBERS)[None, :]
    ids = groups * GROUP_SIZE + members
    real = (groups < NUM_GROUPS) & (members < GROUP_SIZE)
    logits += row * (NUM_GROUPS * GROUP_SIZE + GATED)
    logit = tl.load(logits + ids, mask=real, other=float("-inf")).to(tl.float32)
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

    SIZE: tl.constexpr = GROUPS * MEMBERS
    keys, places = _keys(tl.reshape(choice, [SIZE]), SIZE), tl.arange(0, TAKEN_PADDED)
    chosen = tl.zeros([TAKEN_PADDED], tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(places == place, SIZE - 1 - (best & (SIZE - 1)).to(tl.int32), chosen)
        keys = tl.where(keys == best, -1 << 62, keys)
    found = tl.where(places < TOP_K, tl.gather(tl.reshape(scores, [SIZE]), chosen, 0), 0.0)
    chosen = chosen // MEMBERS * GROUP_SIZE + chosen % MEMBERS
    if NORMALISES:
        found = found / (tl.sum(found, 0) + EPSILON)
    is_shared = places >= TOP_K
    found *= scale
    if factors is not None:
        found *= tl.load(factors + chosen, mask=places < TOP_K, other=0.0).to(tl.float32)
    chosen = tl.where(is_shared, NUM_GROUPS * GROUP_SIZE + places - TOP_K, chosen)
    found = tl.where(is_shared, 1.0, found)
    if GATED:
        gate = tl.load(logits + NUM_GROUPS * GROUP_SIZE).to(tl.float32)
        found = tl.where(is_shared, 1.0 / (1.0 + tl.exp(-gate)), found)
    tl.store(experts + row * TAKEN + places, chosen, mask=places < TAKEN)
    tl.store(weights + row * TAKEN + places, found, mask=places < TAKEN)


@triton.jit
def moe_routing_kernel(
    logits: tl.tensor, bias: tl.tensor, factors: tl.tensor, experts: tl.tensor, weights: tl.tensor,
    scale: tl.tensor, EPSILON: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISES: tl.constexpr,
    TOP_K: tl.constexpr, TAKEN: tl.constexpr, TAKEN_PADDED: tl.constexpr, GATED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row per program."""
    begin(PDL)
    choose_experts(
        tl.program_id(0).to(tl.int64), logits, bias, factors, experts, weights, scale, EPSILON,
        SOFTMAX, NORMALISES, TOP_K, TAKEN, TAKEN_PADDED, GATED, NUM_GROUPS, GROUP_SIZE, TOP_GROUPS,
        GROUPS, MEMBERS,
    )  # fmt: skip


# Sums the outputs of a token's experts with their weights: a Triton kernel if Triton is available,
# otherwise the plain-torch reference.
#
# A token's experts are added in the order of their scores, in float32, so the sum does not depend
# on other tokens.


@dataclass(frozen=True)
class OwnExperts:
    """The `number` experts that a rank has, from `first` on, and `experts` `[T, k]` int32,
    contiguous: those of each token."""

    experts: torch.Tensor
    first: int
    number: int


@with_kernel("moe_combine_triton")
def moe_combine(
    parts: torch.Tensor,
    weights: torch.Tensor | None,
    top_k: int,
    add_to: torch.Tensor | None = None,
    own: OwnExperts | None = None,
) -> torch.Tensor:
    """`[T, H]`: the weighted sum over the k experts, rounded once; added to `add_to` if given.

    Args:
        parts: `[T * k, H]`, contiguous.
        weights: `[T, k]` float32, or None for ones.
        top_k: k.
        add_to: the residual stream `[T, H]`, contiguous; changed in place and returned.
        own: only their outputs are added, the others are not read; None: all are.
    """
    if own is not None:
        number = own.experts.flatten() - own.first
        is_elsewhere = (number < 0) | (number >= own.number)
        parts = parts.masked_fill(is_elsewhere.view(-1, 1), 0)
    by_token = parts.view(-1, top_k, parts.shape[1]).float()
    if weights is not None:
        by_token = by_token * weights[..., None]
    total = by_token[:, 0].clone()
    for choice in range(1, top_k):
        total += by_token[:, choice]
    if add_to is None:
        return total.to(parts.dtype)
    return add_to.copy_(total.add_(add_to))


_BLOCK = 1024  # columns per program


def moe_combine_triton(
    parts: torch.Tensor,
    weights: torch.Tensor | None,
    top_k: int,
    add_to: torch.Tensor | None = None,
    own: OwnExperts | None = None,
) -> torch.Tensor:
    """See `moe_combine`."""
    num_rows, size = parts.shape[0] // top_k, parts.shape[1]
    output = parts.new_empty(num_rows, size) if add_to is None else add_to
    assert parts.is_contiguous() and output.is_contiguous() and output.shape == (num_rows, size)
    if num_rows:
        moe_combine_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            parts,
            weights,
            add_to,
            output,
            None if own is None else own.experts,
            FIRST=0 if own is None else own.first,
            NUMBER=0 if own is None else own.number,
            SIZE=size,
            TOP_K=top_k,
            BLOCK=_BLOCK,
            num_warps=4,
            **programmatic_launch(parts.device),
        )
    return output


@triton.jit
def moe_combine_kernel(
    parts: tl.tensor, weights: tl.tensor, add_to: tl.tensor, output: tl.tensor, experts: tl.tensor,
    FIRST: tl.constexpr, NUMBER: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        assignment = row * TOP_K + choice
        is_read = real
        if experts is not None:
            number = tl.load(experts + assignment) - FIRST
            is_read = columns < tl.where((number >= 0) & (number < NUMBER), SIZE, 0)
        part = tl.load(parts + assignment * SIZE + columns, mask=is_read, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + assignment)
        total += part
    if add_to is not None:
        total += tl.load(add_to + row * SIZE + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, total.to(output.dtype.element_ty), mask=real)
