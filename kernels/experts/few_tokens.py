"""What precedes the GEMMs of a mixture of experts, of up to 8 tokens, in one launch: RMSNorm, the
router's logits, and the experts of every token. A Triton kernel if Triton is available, otherwise
the plain-torch reference, which is the definition.

The assignments are not sorted. One token's need not be, because its experts differ."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.experts.routing import (
    RoutingRule,
    choose_experts,
    moe_routing,
    routing_options,
)
from tllm_spec.kernels.gemm.norms import NormWeight, norm_row, rms_norm
from tllm_spec.kernels.launch import launch_dependents, programmatic_launch, wait_for_previous

MAX_TOKENS = 8
BLOCK_ROWS = 16  # of which one is used
EXPERTS_PER_PROGRAM = 4


@dataclass(frozen=True)
class RouterWeights:
    """How a layer chooses experts."""

    weight: torch.Tensor
    """`[E, H]`, contiguous; `[E + 1, H]` if the rule gates the shared expert."""
    bias: torch.Tensor | None
    """`[E]`, of the logits."""
    correction_bias: torch.Tensor | None
    """See `moe_routing`."""
    rule: RoutingRule
    dtype: torch.dtype
    """The dtype of the logits."""
    num_arrived: torch.Tensor
    """int32 `[MAX_TOKENS]`: programs that have stored a token's logits; 0 before and after a
    launch."""
    factors: torch.Tensor | None = None
    """See `moe_routing`."""
    inputs: NormWeight | None = None
    """The norm of what experts read; None: that of what the router reads."""


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens `x` `[T, H]` after the norm, the weights `[T, k]` of their experts, and their rows."""

    x: torch.Tensor
    weights: torch.Tensor
    rows: ExpertRows


@with_kernel("route_few_triton")
def route_few(hidden: torch.Tensor, norm: NormWeight, router: RouterWeights) -> RoutedTokens:
    """Norms and routes 1 to MAX_TOKENS tokens.

    hidden: `[T, H]`, contiguous."""
    x = rms_norm.reference(hidden, norm.weight, norm.eps)
    logits = x.float().mm(router.weight.float().t())
    if router.bias is not None:
        logits += router.bias
    rule = router.rule
    further = router.correction_bias, router.factors
    chosen = moe_routing.reference(logits.to(router.dtype), rule, *further)
    flat = chosen[0].flatten()
    own = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    if (inputs := router.inputs) is not None:
        x = rms_norm.reference(hidden, inputs.weight, inputs.eps)
    blocks, number = torch.stack((flat, own, own + 1)), own.new_tensor([len(flat)])
    rows = ExpertRows(own, blocks, number, BLOCK_ROWS, rule.num_taken, chosen[0], is_sorted=False)
    return RoutedTokens(x, chosen[1], rows)


_COLUMNS_PER_WARP = 512


def route_few_triton(hidden: torch.Tensor, norm: NormWeight, router: RouterWeights) -> RoutedTokens:
    """See `route_few`."""
    (num_tokens, size), rule, number = hidden.shape, router.rule, len(router.weight)
    assert hidden.is_contiguous() and router.weight.is_contiguous() and 0 < num_tokens <= MAX_TOKENS
    blocks = hidden.new_empty(3, num_tokens * rule.num_taken, dtype=torch.int32)
    order, num_blocks = torch.empty_like(blocks[0]), blocks.new_empty(1)
    experts = blocks[0].view(num_tokens, -1)
    own = order, blocks, num_blocks
    rows = ExpertRows(*own, BLOCK_ROWS, rule.num_taken, experts, is_sorted=False)
    x, weights = torch.empty_like(hidden), torch.empty_like(experts, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    route_few_kernel[(triton.cdiv(number, EXPERTS_PER_PROGRAM), num_tokens)](
        *(hidden, norm.weight, norm.eps),
        *((None, 0.0) if router.inputs is None else (router.inputs.weight, router.inputs.eps)),
        *(router.weight, router.bias, x),
        hidden.new_empty(num_tokens, number, dtype=router.dtype),
        *(router.correction_bias, router.factors),
        *(blocks, weights, rule.scale, order, num_blocks),
        router.num_arrived,
        SIZE=size,
        BLOCK=block,
        NUMBER=number,
        OWN=EXPERTS_PER_PROGRAM,
        **routing_options(rule, number - rule.gates_shared),
        num_warps=max(1, min(block // _COLUMNS_PER_WARP, 16)),
        **programmatic_launch(hidden.device),
    )
    return RoutedTokens(x, weights, rows)


@triton.jit
def _fetch_weights(
    router: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr,
    OWN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[OWN, BLOCK]`. No kernel writes them, so they are read while the previous one runs."""
    own, columns = tl.program_id(0) * OWN + tl.arange(0, OWN), tl.arange(0, BLOCK)
    real = (own < NUMBER)[:, None] & (columns < SIZE)[None, :]
    return tl.load(router + own[:, None] * SIZE + columns[None, :], mask=real, other=0.0)


@triton.jit
def route_few_kernel(
    hidden: tl.tensor, norm: tl.tensor, eps: tl.tensor, input_norm: tl.tensor,
    input_eps: tl.tensor, router: tl.tensor, router_bias: tl.tensor, x: tl.tensor,
    logits: tl.tensor, correction_bias: tl.tensor, factors: tl.tensor, blocks: tl.tensor,
    weights: tl.tensor, scale: tl.tensor, order: tl.tensor, num_blocks: tl.tensor,
    num_arrived: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr,
    OWN: tl.constexpr,
    EPSILON: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISES: tl.constexpr, TOP_K: tl.constexpr,
    TAKEN: tl.constexpr, TAKEN_PADDED: tl.constexpr, GATED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles of OWN experts, tokens). The last program of a token chooses its experts."""
    weight = _fetch_weights(router, SIZE, BLOCK, NUMBER, OWN)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    own, columns = tile * OWN + tl.arange(0, OWN), tl.arange(0, BLOCK)
    real = columns < SIZE
    normed = norm_row(hidden + row * SIZE, norm, eps, columns, real, SIZE).to(x.dtype.element_ty)
    if tile == 0:
        read = normed
        if input_norm is not None:
            read = norm_row(hidden + row * SIZE, input_norm, input_eps, columns, real, SIZE)
        tl.store(x + row * SIZE + columns, read.to(x.dtype.element_ty), mask=real)
    logit = tl.sum(weight.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    if router_bias is not None:
        logit += tl.load(router_bias + own, mask=own < NUMBER, other=0.0).to(tl.float32)
    logit = logit.to(logits.dtype.element_ty)
    tl.store(logits + row * NUMBER + own, logit, mask=own < NUMBER)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(num_arrived + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(num_arrived + row, 0)
        choose_experts(
            row, logits, correction_bias, factors, blocks, weights, scale, EPSILON, SOFTMAX,
            NORMALISES, TOP_K, TAKEN, TAKEN_PADDED, GATED, NUM_GROUPS, GROUP_SIZE, TOP_GROUPS,
            GROUPS, MEMBERS,
        )  # fmt: skip
        number, taken = tl.num_programs(1) * TAKEN, tl.arange(0, TAKEN_PADDED)
        places = row * TAKEN + taken
        tl.store(order + places, places, mask=taken < TAKEN)
        tl.store(blocks + number + places, places, mask=taken < TAKEN)
        tl.store(blocks + 2 * number + places, places + 1, mask=taken < TAKEN)
        tl.store(num_blocks, number)
