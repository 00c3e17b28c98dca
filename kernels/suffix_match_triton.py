"""`append_tokens` and `match_suffixes` as Triton kernels. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.suffix_match import (
    EVERYONE,
    PLACE_BITS,
    Matches,
    TextTable,
)

BLOCK = 4096  # positions that are compared at a time
MAX_SPLITS = 32


def append_tokens_triton(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """See `append_tokens`."""
    assert tokens.is_contiguous() and texts.stride(1) == 1
    width = tokens.shape[1]
    _append[(len(slots),)](
        texts,
        texts.stride(0),
        texts.shape[1],
        slots,
        kv_lens,
        tokens,
        lens,
        width,
        triton.next_power_of_2(width),
        **programmatic_launch(slots.device),
        num_warps=1,
    )


def match_suffixes_triton(
    table: TextTable,
    slots: torch.Tensor,
    draft_len: int,
    max_match: int,
    num_matches: int = 1,
    oldest: bool = False,
) -> Matches:
    """See `match_suffixes`. Each text is searched by up to MAX_SPLITS programs, and each text that
    slots share by one for each of the slots."""
    batch, num_slots, width = len(slots), len(table.kv_lens), table.width
    num_splits = min(triton.cdiv(width, BLOCK), MAX_SPLITS)
    num_parts = num_splits + (0 if table.salts is None else len(table.salts))
    scores = slots.new_empty((batch, num_parts, num_matches))
    drafts = slots.new_empty((batch, num_matches, draft_len))
    num_drafts, lengths = slots.new_empty((batch, num_matches)), torch.empty_like(slots)
    texts = (table.memory, width, num_slots, table.kv_lens, slots)
    launch = programmatic_launch(slots.device)
    _score[(batch, num_parts)](
        *texts,
        table.salts,
        scores,
        num_splits,
        max_match,
        num_matches,
        triton.next_power_of_2(num_matches),
        oldest,
        SHARED_WIDTH,
        EVERYONE if table.has_corpus else None,
        BLOCK,
        PLACE_BITS,
        **launch,
        num_warps=8,
    )
    _copy[(batch,)](
        *texts,
        len(table.memory),
        scores,
        num_parts * num_matches,
        triton.next_power_of_2(num_parts * num_matches),
        drafts,
        num_drafts,
        lengths,
        num_matches,
        draft_len,
        triton.next_power_of_2(draft_len),
        oldest,
        PLACE_BITS,
        **launch,
        num_warps=4,
    )
    return Matches(drafts, num_drafts, lengths)


@triton.jit(do_not_specialize=["stride", "max_len"])  # type: ignore[untyped-decorator]  # triton has no types
def _append(
    texts: tl.tensor, stride: tl.tensor, max_len: tl.tensor, slots: tl.tensor, kv_lens: tl.tensor,
    tokens: tl.tensor, lens: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, length = tl.load(slots + request), tl.load(lens + request)
    position = tl.load(kv_lens + slot) + 1 - length + column
    token = tl.load(tokens + request * width + column, mask=column < width, other=0)
    is_new = (column < width) & (column < length) & (position < max_len)
    tl.store(texts + slot * stride + position, tl.maximum(token, 0).to(tl.int32), mask=is_new)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _lengths(
    text: tl.tensor, end: tl.tensor, row: tl.tensor, position: tl.tensor, is_place: tl.tensor,
    max_match: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """How many tokens of a row up to each position equal the text's last ones."""
    length, back = tl.zeros_like(position), end * 0
    num_alive = tl.max(is_place.to(tl.int32), axis=0)
    while num_alive > 0:
        last = tl.load(text + end - back)
        is_place = is_place & (position >= back)
        is_place = is_place & (tl.load(row + position - back, mask=is_place, other=-1) == last)
        length += is_place.to(tl.int32)
        back += 1
        is_over = (back >= max_match) | (back > end)
        num_alive = tl.where(is_over, 0, tl.max(is_place.to(tl.int32), axis=0))
    return length


@triton.jit(do_not_specialize=["width", "num_slots", "max_match"])  # type: ignore[untyped-decorator]  # triton has no types
def _score(
    memory: tl.tensor, width: tl.tensor, num_slots: tl.tensor, kv_lens: tl.tensor,
    slots: tl.tensor, salts: tl.tensor, scores: tl.tensor, num_splits: tl.constexpr,
    max_match: tl.tensor, num_matches: tl.constexpr, matches_block: tl.constexpr,
    oldest: tl.constexpr, shared_width: tl.constexpr, everyone: tl.constexpr, block: tl.constexpr,
    place_bits: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The scores of the best matches in one part of what a request may read, in any order; 0 or
    less: there are no more."""
    begin(PDL)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + request)
    end = tl.minimum(tl.load(kv_lens + slot), width - 1).to(tl.int32)
    is_own, place, stop = part < num_splits, slot * width, end
    first, step = part * block, num_splits * block
    if salts is not None:
        row = tl.maximum(part - num_splits, 0).to(tl.int64)
        is_slot = row < num_slots
        salt, own_salt = tl.load(salts + row), tl.load(salts + slot)
        other_end = tl.load(kv_lens + row, mask=is_slot, other=0)
        other_end = tl.minimum(other_end, width - 1).to(tl.int32)
        shared_place = num_slots * width.to(tl.int64) + (row - num_slots) * shared_width
        other_place = tl.where(is_slot, row * width, shared_place)
        other_stop = tl.where(is_slot, other_end, shared_width - 1)
        is_shared = (salt == own_salt) & (salt >= 0) & (row != slot)
        if everyone is not None:
            is_shared |= salt == everyone
        place = tl.where(is_own, place, other_place)
        stop = tl.where(is_own, stop, tl.where(is_shared, other_stop, 0))
        first, step = tl.where(is_own, first, 0), tl.where(is_own, step, block)
    columns = tl.arange(0, matches_block)
    # Distinct, so that one of them is replaced at a time.
    best = tl.where(columns < num_matches, -columns.to(tl.int64), 9223372036854775807)
    for start in range(first, stop, step):
        position = start + tl.arange(0, block)
        is_place = position < stop
        if salts is not None:
            following = tl.load(memory + place + position + 1, mask=is_place, other=0)
            is_place = is_place & (following >= 0)
        text = memory + slot * width
        length = _lengths(text, end, memory + place, position, is_place, max_match)
        score = place + position
        if oldest:
            score = (1 << place_bits) - 1 - score
        score += (length.to(tl.int64) * 2 + is_own.to(tl.int64)) << place_bits
        score = tl.where(length > 0, score, 0)
        top = tl.max(score, axis=0)
        while top > tl.min(best, axis=0):
            best = tl.where(best == tl.min(best, axis=0), top, best)
            score = tl.where(score == top, 0, score)
            top = tl.max(score, axis=0)
    own = (request * tl.num_programs(1) + part) * num_matches + columns
    tl.store(scores + own, best, mask=columns < num_matches)


@triton.jit(do_not_specialize=["width", "num_slots", "size"])  # type: ignore[untyped-decorator]  # triton has no types
def _copy(
    memory: tl.tensor, width: tl.tensor, num_slots: tl.tensor, kv_lens: tl.tensor,
    slots: tl.tensor, size: tl.tensor, scores: tl.tensor, num_scores: tl.constexpr,
    scores_block: tl.constexpr, drafts: tl.tensor, num_drafts: tl.tensor, lengths: tl.tensor,
    num_matches: tl.constexpr, draft_len: tl.constexpr, drafts_block: tl.constexpr,
    oldest: tl.constexpr, place_bits: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The best matches of all parts, and what follows them."""
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    end = slot * width + tl.minimum(tl.load(kv_lens + slot), width - 1)
    last = tl.load(memory + end)
    own = tl.arange(0, scores_block)
    score = tl.load(scores + request * num_scores + own, mask=own < num_scores, other=0)
    column = tl.arange(0, drafts_block)
    for match in range(num_matches):
        top = tl.maximum(tl.max(score, axis=0), 0)
        score = tl.where(score == top, 0, score)
        place = top & ((1 << place_bits) - 1)
        if oldest:
            place = (1 << place_bits) - 1 - place
        start = place + 1
        is_own = ((top >> place_bits) & 1) > 0
        row = tl.minimum(start // width, num_slots - 1)
        row_end = row * width + tl.minimum(tl.load(kv_lens + row), width - 1)
        row_end = tl.where(is_own, end, tl.where(start < num_slots * width, row_end, size - 1))
        copied = column % tl.maximum(end + 1 - start, 1)
        at = start + tl.where(is_own, copied, column)
        is_read = (column < draft_len) & (at <= tl.where(top > 0, row_end, -1))
        token = tl.load(memory + at, mask=is_read, other=-1)
        number = tl.min(tl.where(token < 0, column, drafts_block), axis=0)
        number = tl.minimum(number, draft_len)
        token = tl.where(column < number, token, last).to(tl.int64)
        first = request * num_matches + match
        tl.store(drafts + first * draft_len + column, token, mask=column < draft_len)
        tl.store(num_drafts + first, number.to(tl.int64))
        if match == 0:
            tl.store(lengths + request, top >> (place_bits + 1))
