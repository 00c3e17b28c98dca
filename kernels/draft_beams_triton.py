"""The Triton kernels of draft_beams.py, one program per request. Importing this file imports
Triton.

A step of growth is one launch instead of about 15, selection one instead of about 30. Growth finds
K maxima of K^2 keys, one after the other. A key is a score's bits, which order scores from 0 on,
then the index. Selection needs no order, and finds the bits that the last chosen score has."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.beam_pool import BeamPool, Beams, DraftTree
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_NO_KEY = tl.constexpr(-(2**63))
_LAST_INDEX = tl.constexpr(2**31 - 1)
_INDEX_STEP = tl.constexpr(2**32)


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
        **programmatic_launch(probs.device),
        num_warps=1,
    )
    return Beams(tokens, probs, rows, bits)


def grow_triton(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> Beams:
    """See `grow`."""
    assert step > 0 and (step + 1) * pool.topk <= min(64, pool.beams.shape[1])
    rows, scores = beams.tokens, beams.scores
    grown = Beams(*(torch.empty_like(each) for each in (rows, scores, rows, rows)))
    _add_children(pool, step, beams, probs, tokens, grown)
    return grown


def add_last_triton(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> None:
    """See `add_last`."""
    assert step > 0 and pool.start(step + 1) == pool.scores.shape[1]
    _add_children(pool, step, beams, probs, tokens, None)


def _add_children(
    pool: BeamPool,
    step: int,
    beams: Beams,
    probs: torch.Tensor,
    tokens: torch.Tensor,
    grown: Beams | None,
) -> None:
    """grown: is filled; None after the last step."""
    assert probs.is_contiguous() and tokens.is_contiguous()
    batch, topk = beams.tokens.shape
    _grow[(batch,)](
        beams.scores,
        beams.bits,
        probs,
        tokens,
        *_pool(pool),
        *((grown.tokens, grown.scores, grown.rows, grown.bits) if grown else (None,) * 4),
        step,
        topk,
        triton.next_power_of_2(topk),
        triton.next_power_of_2(topk**2),
        grown is None,
        **programmatic_launch(probs.device),
        num_warps=1,
    )


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
        **programmatic_launch(tokens.device),
        num_warps=4,
    )
    return DraftTree(tokens, parents, depths, bits, scores=scores)


def _pool(pool: BeamPool) -> tuple[torch.Tensor | int, ...]:
    """The pool as arguments: its tensors, and their widths."""
    tensors = (pool.scores, pool.tokens, pool.beams)
    assert all(tensor.is_contiguous() for tensor in tensors)
    return *tensors, pool.scores.shape[1], pool.beams.shape[1]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _score_bits(scores: tl.tensor) -> tl.tensor:
    """Integers in the order of the scores. A NaN is less than any score."""
    return tl.where(scores != scores, -1, scores.to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _first(
    probs: tl.tensor,
    tokens: tl.tensor,
    pool_scores: tl.tensor,
    pool_tokens: tl.tensor,
    pool_beams: tl.tensor,
    pool_size: tl.constexpr,
    beams_size: tl.constexpr,
    rows: tl.tensor,
    bits: tl.tensor,
    topk: tl.constexpr,
    block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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


@triton.jit(do_not_specialize=["step"])  # type: ignore[untyped-decorator]  # triton has no types
def _grow(
    scores: tl.tensor,
    bits: tl.tensor,
    probs: tl.tensor,
    tokens: tl.tensor,
    pool_scores: tl.tensor,
    pool_tokens: tl.tensor,
    pool_beams: tl.tensor,
    pool_size: tl.constexpr,
    beams_size: tl.constexpr,
    next_tokens: tl.tensor,
    next_scores: tl.tensor,
    next_rows: tl.tensor,
    next_bits: tl.tensor,
    step: tl.tensor,
    topk: tl.constexpr,
    topk_block: tl.constexpr,
    block: tl.constexpr,
    is_last: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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
        bits_of_scores = _score_bits(score).to(tl.int64)
        keys = bits_of_scores * _INDEX_STEP + (_LAST_INDEX - children)
        keys = tl.where(exists, keys, _NO_KEY)
        beams = tl.arange(0, topk_block)
        best = tl.zeros([topk_block], tl.int64)
        for beam in tl.range(0, topk):
            key = tl.max(keys, axis=0)
            best = tl.where(beams == beam, (key & 0x7FFFFFFF) ^ 0x7FFFFFFF, best)
            keys = tl.where(keys == key, _NO_KEY, keys)
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _select(
    pool_scores: tl.tensor,
    pool_tokens: tl.tensor,
    pool_beams: tl.tensor,
    pool_size: tl.constexpr,
    beams_size: tl.constexpr,
    tokens: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    all_bits: tl.tensor,
    chosen_scores: tl.tensor,
    size: tl.constexpr,
    num_drafts: tl.constexpr,
    topk: tl.constexpr,
    block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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
