"""Dynamic draft trees: beam growth by cumulative probability, and the choice of the best nodes, as
in EAGLE-2 (Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
2024). On CUDA Triton kernels, elsewhere the plain-torch references.

A candidate's score is the float32 product of the probabilities on its path. A product of factors up
to 1 is never above its parent's, and equal scores go to the lower index, where the parent is, so a
chosen node's parent is always chosen. (Sums of logarithms would round differently and break ties
that such scores have.) A NaN counts as less than any score, and so do its descendants, which are
NaN: such a request gets a valid tree of no use."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.drafts.top_tokens import (
    NO_KEY,
    best_columns,
    key_indices,
    largest_keys,
    ordered_keys,
)
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.slots.accept import DraftTree

# The tensors of `draft_beams`: candidates, beams and chosen trees.


@dataclass(frozen=True)
class BeamPool:
    """All candidates of a round of B requests with K beams and S steps, M = K + (S-1) K^2. Step 0
    adds K candidates, every later step K^2: the K children of each of the K beams, in order."""

    topk: int
    scores: torch.Tensor
    """`[B, M]` float32."""
    tokens: torch.Tensor
    """`[B, M]` int64."""
    beams: torch.Tensor
    """`[B, max(S-1, 1) * K]` int64: the index in the pool of beam k of step s, at s * K + k.
    Candidate e >= K is a child of the beam at e // K - 1."""

    @classmethod
    def allocate(cls, batch: int, topk: int, num_steps: int, device: torch.device) -> "BeamPool":
        size = topk + (num_steps - 1) * topk**2
        return cls(
            topk,
            torch.empty((batch, size), dtype=torch.float32, device=device),
            torch.empty((batch, size), dtype=torch.int64, device=device),
            torch.empty((batch, max(num_steps - 1, 1) * topk), dtype=torch.int64, device=device),
        )

    @property
    def device(self) -> torch.device:
        return self.scores.device

    def start(self, step: int) -> int:
        """The first candidate of a step."""
        return 0 if step == 0 else self.topk + (step - 1) * self.topk**2


@dataclass(frozen=True)
class Beams:
    """The K best candidates of a step, best first: the next inputs of the draft model."""

    tokens: torch.Tensor
    """`[B, K]` int64."""
    scores: torch.Tensor
    """`[B, K]` float32."""
    rows: torch.Tensor
    """`[B, K]` int64: the row `b * K + k` of the beam that each continues, for gathering hidden
    states `[B * K, H]`. In step 0 it is the row itself."""
    bits: torch.Tensor
    """`[B, K]` int64: which beams of this round each attends to; bit `s * K + k` is beam k of step
    s. Its own bit is set."""


@with_kernel("first_beams_triton")
def first_beams(pool: BeamPool, probs: torch.Tensor, tokens: torch.Tensor) -> Beams:
    """Step 0: the K best tokens `[B, K]` after the root and their probabilities, best first
    (`top_tokens`). All of them become candidates and beams."""
    batch, topk = probs.shape
    columns = torch.arange(topk, device=probs.device).expand(batch, topk)
    pool.scores[:, :topk] = probs
    pool.tokens[:, :topk] = tokens
    pool.beams[:, :topk] = columns
    rows = torch.arange(batch * topk, device=probs.device).view(batch, topk)
    return Beams(tokens, probs, rows, torch.ones_like(columns) << columns)


@with_kernel("grow_triton")
def grow(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> Beams:
    """Step `step` >= 1: adds the children of all beams to the pool, and returns the K best; after
    the last step, whose children the draft model does not run, `beams`.

    probs, tokens `[B, K, K]`: of each beam's K best next tokens, best first. The steps up to this
    one have at most 64 beams."""
    batch, topk = beams.tokens.shape
    start, end = pool.start(step), pool.start(step + 1)
    scores = pool.scores[:, start:end] = (beams.scores.unsqueeze(2) * probs).flatten(1)
    pool.tokens[:, start:end] = tokens.flatten(1)
    if end == pool.scores.shape[1]:
        return beams
    best = best_columns(scores, topk)
    pool.beams[:, step * topk : (step + 1) * topk] = best + start
    rows = best // topk
    columns = torch.arange(topk, device=best.device)
    own_bits = torch.ones_like(columns) << (columns + step * topk)
    return Beams(
        tokens.flatten(1).gather(1, best),
        scores.gather(1, best),
        rows + torch.arange(batch, device=best.device).unsqueeze(1) * topk,
        beams.bits.gather(1, rows) | own_bits,
    )


@with_kernel("select_triton")
def select(pool: BeamPool, num_drafts: int, with_scores: bool = False) -> DraftTree:
    """The best `num_drafts` (W-1, 1 to 63) candidates of a full pool, with their scores or without,
    in the order of the pool: by depth, siblings from the most probable on. Raises nothing: the pool
    has at least so many candidates (`K + (S-1) K^2`)."""
    (batch, size), topk, device = pool.scores.shape, pool.topk, pool.scores.device
    # Node j + 1 is candidate chosen[j].
    chosen = best_columns(pool.scores, num_drafts).sort(dim=1).values
    nodes = torch.zeros((batch, size), dtype=torch.int64, device=device)
    numbers = torch.arange(1, num_drafts + 1, device=device).expand(batch, num_drafts)
    nodes.scatter_(1, chosen, numbers)
    has_root = chosen < topk
    parent = nodes.gather(1, pool.beams.gather(1, (chosen // topk - 1).clamp_min(0)))
    parents = torch.where(has_root, 0, parent)
    depths = torch.where(has_root, 1, (chosen - topk) // topk**2 + 2)
    own_bits = (torch.ones_like(numbers) << numbers) | 1
    bits = own_bits
    for _ in range((size - topk) // topk**2):  # after n turns: n generations of ancestors
        bits = own_bits | torch.where(has_root, 1, bits.gather(1, (parents - 1).clamp_min(0)))
    root = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    return DraftTree(
        pool.tokens.gather(1, chosen),
        parents=torch.cat((root - 1, parents), dim=1),
        depths=torch.cat((root, depths), dim=1),
        bits=torch.cat((root + 1, bits), dim=1),
        scores=pool.scores.gather(1, chosen) if with_scores else None,
    )


# A step of growth is one launch instead of about 15, selection one instead of about 30. Growth
# finds K maxima of K^2 keys, one after the other. A key is a score's bits, which order scores from
# 0 on, then the index. Selection needs no order, and finds the bits that the last chosen score
# has.


def first_beams_triton(pool: BeamPool, probs: torch.Tensor, tokens: torch.Tensor) -> Beams:
    """See `first_beams`."""
    assert probs.is_contiguous() and tokens.is_contiguous()
    batch, topk = probs.shape
    rows, bits = torch.empty_like(tokens), torch.empty_like(tokens)
    _first[(batch,)](
        probs,
        tokens,
        *_pool(pool),
        rows,
        bits,
        topk,
        triton.next_power_of_2(topk),
        **programmatic_launch(probs.device, 1),
    )
    return Beams(tokens, probs, rows, bits)


def grow_triton(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> Beams:
    """See `grow`."""
    is_last = pool.start(step + 1) == pool.scores.shape[1]
    assert step > 0 and (is_last or (step + 1) * pool.topk <= min(64, pool.beams.shape[1]))
    assert probs.is_contiguous() and tokens.is_contiguous()
    (batch, topk), rows, scores = beams.tokens.shape, beams.tokens, beams.scores
    grown = beams
    if not is_last:
        grown = Beams(*(torch.empty_like(each) for each in (rows, scores, rows, rows)))
    _grow[(batch,)](
        scores,
        beams.bits,
        probs,
        tokens,
        *_pool(pool),
        *((None,) * 4 if is_last else (grown.tokens, grown.scores, grown.rows, grown.bits)),
        step,
        topk,
        triton.next_power_of_2(topk),
        triton.next_power_of_2(topk**2),
        is_last,
        **programmatic_launch(probs.device, 1),
    )
    return grown


def select_triton(pool: BeamPool, num_drafts: int, with_scores: bool = False) -> DraftTree:
    """See `select`."""
    assert 0 < num_drafts < 64 and num_drafts <= pool.scores.shape[1]
    (batch, size), topk = pool.scores.shape, pool.topk
    tokens = pool.tokens.new_empty(batch, num_drafts)
    parents, depths, bits = pool.tokens.new_empty(3, batch, num_drafts + 1)
    scores = pool.scores.new_empty(batch, num_drafts) if with_scores else None
    block = triton.next_power_of_2(size)
    _select[(batch,)](
        *_pool(pool),
        tokens,
        parents,
        depths,
        bits,
        scores,
        size,
        num_drafts,
        topk,
        block,
        **programmatic_launch(tokens.device, 4),
    )
    return DraftTree(tokens, parents=parents, depths=depths, bits=bits, scores=scores)


def _pool(pool: BeamPool) -> tuple[torch.Tensor | int, ...]:
    """The pool as arguments: its tensors, and their widths."""
    tensors = (pool.scores, pool.tokens, pool.beams)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return *tensors, pool.scores.shape[1], pool.beams.shape[1]


@triton.jit
def _score_bits(scores: tl.tensor) -> tl.tensor:
    """Integers in the order of the scores. A NaN is less than any score."""
    return tl.where(scores != scores, -1, scores.to(tl.int32, bitcast=True))


@triton.jit
def _is_among_best(bits: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """Whether each of `bits` is among the `number` largest, equal ones by index."""
    # Bit by bit, the largest bound that so many reach.
    bound = tl.where(tl.sum((bits >= 0).to(tl.int32), axis=0) >= number, 0, -1)
    for place in tl.range(0, 31):
        higher = bound | (1 << (30 - place))  # -1 stays
        reached = tl.sum((bits >= higher).to(tl.int32), axis=0) >= number
        bound = tl.where(reached, higher, bound)
    above, equal = bits > bound, bits == bound
    num_equal = number - tl.sum(above.to(tl.int32), axis=0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= num_equal))


@triton.jit
def _first(
    probs: tl.tensor, tokens: tl.tensor, pool_scores: tl.tensor, pool_tokens: tl.tensor,
    pool_beams: tl.tensor, pool_size: tl.constexpr, beams_size: tl.constexpr, rows: tl.tensor,
    bits: tl.tensor, topk: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, beams = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    exists = beams < topk
    own = request * topk + beams
    score = tl.load(probs + own, mask=exists, other=0.0)
    token = tl.load(tokens + own, mask=exists, other=0)
    tl.store(pool_scores + request * pool_size + beams, score, mask=exists)
    tl.store(pool_tokens + request * pool_size + beams, token, mask=exists)
    tl.store(pool_beams + request * beams_size + beams, beams.to(tl.int64), mask=exists)
    tl.store(rows + own, own, mask=exists)
    tl.store(bits + own, tl.full([block], 1, tl.int64) << beams.to(tl.int64), mask=exists)


@triton.jit(do_not_specialize=["step"])
def _grow(
    scores: tl.tensor, bits: tl.tensor, probs: tl.tensor, tokens: tl.tensor, pool_scores: tl.tensor,
    pool_tokens: tl.tensor, pool_beams: tl.tensor, pool_size: tl.constexpr,
    beams_size: tl.constexpr, next_tokens: tl.tensor, next_scores: tl.tensor, next_rows: tl.tensor,
    next_bits: tl.tensor, step: tl.tensor, topk: tl.constexpr, topk_block: tl.constexpr,
    block: tl.constexpr, is_last: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, children = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    exists = children < topk * topk
    start = topk + (step - 1) * topk * topk
    own = request * topk * topk + children
    prob = tl.load(probs + own, mask=exists, other=0.0)
    token = tl.load(tokens + own, mask=exists, other=0)
    score = prob * tl.load(scores + request * topk + children // topk, mask=exists, other=0.0)
    tl.store(pool_scores + request * pool_size + start + children, score, mask=exists)
    tl.store(pool_tokens + request * pool_size + start + children, token, mask=exists)
    if not is_last:
        keys = ordered_keys(tl.where(score != score, -1.0, score), children)
        kept = largest_keys(tl.where(exists, keys, NO_KEY), topk, topk_block)
        beams, best = tl.arange(0, topk_block), key_indices(kept)
        is_beam = beams < topk
        row = best // topk
        child = request * topk * topk + best
        # Loaded again: the children's scores and tokens are spread over the threads.
        next_score = tl.load(probs + child, mask=is_beam, other=0.0)
        next_score *= tl.load(scores + request * topk + row, mask=is_beam, other=0.0)
        next_token = tl.load(tokens + child, mask=is_beam, other=0)
        seen = tl.load(bits + request * topk + row, mask=is_beam, other=0)
        seen |= tl.full([topk_block], 1, tl.int64) << (step * topk + beams).to(tl.int64)
        places = request * topk + beams
        tl.store(next_tokens + places, next_token, mask=is_beam)
        tl.store(next_scores + places, next_score, mask=is_beam)
        tl.store(next_rows + places, request * topk + row, mask=is_beam)
        tl.store(next_bits + places, seen, mask=is_beam)
        beam_index = request * beams_size + step * topk + beams
        tl.store(pool_beams + beam_index, start + best, mask=is_beam)


@triton.jit
def _select(
    pool_scores: tl.tensor, pool_tokens: tl.tensor, pool_beams: tl.tensor, pool_size: tl.constexpr,
    beams_size: tl.constexpr, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    all_bits: tl.tensor, chosen_scores: tl.tensor, size: tl.constexpr, num_drafts: tl.constexpr,
    topk: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Every candidate computes the node that it would be; the chosen ones are stored."""
    begin(PDL)
    request, index = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    exists = index < size
    scores = tl.load(pool_scores + request * pool_size + index, mask=exists, other=0.0)
    token = tl.load(pool_tokens + request * pool_size + index, mask=exists, other=0)
    is_chosen = _is_among_best(tl.where(exists, _score_bits(scores), -2), num_drafts)
    node = tl.cumsum(is_chosen.to(tl.int32), axis=0)
    has_root = index < topk
    parent_index = tl.load(
        pool_beams + request * beams_size + index // topk - 1,
        mask=is_chosen & (index >= topk),
        other=0,
    ).to(tl.int32)
    parent = tl.where(has_root, 0, tl.gather(node, parent_index, 0))
    depth = tl.where(has_root, 1, (index - topk) // (topk * topk) + 2)
    own_bits = (tl.full([block], 1, tl.int64) << node.to(tl.int64)) | 1
    bits = own_bits
    for _ in tl.range(0, (size - topk) // (topk * topk)):
        bits = own_bits | tl.where(has_root, 1, tl.gather(bits, parent_index, 0))
    row = request * (num_drafts + 1)
    tl.store(tokens + request * num_drafts + node - 1, token, mask=is_chosen)
    if chosen_scores is not None:
        tl.store(chosen_scores + request * num_drafts + node - 1, scores, mask=is_chosen)
    tl.store(parents + row + node, parent.to(tl.int64), mask=is_chosen)
    tl.store(depths + row + node, depth.to(tl.int64), mask=is_chosen)
    tl.store(all_bits + row + node, bits, mask=is_chosen)
    tl.store(parents + row, -1)
    tl.store(depths + row, 0)
    tl.store(all_bits + row, 1)
