"""Drafts that follow an earlier occurrence of the end of a text: the texts of slots on the device,
texts that slots share, and the longest matches of a text's end. On CUDA Triton kernels, elsewhere
the plain-torch references."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided

NO_TOKEN = -1
EVERYONE = -2  # the salt of rows that all slots share
PLACE_BITS = 46  # of a score: below the length of the match and a bit for matches in the own text
LAST_PLACE = (1 << PLACE_BITS) - 1


@dataclass(frozen=True)
class TextTable:
    """The texts of S slots of at most L tokens, and R shared rows with pieces of other texts.

    memory: `[S * L + R * SHARED_WIDTH]` int32: the slots' rows, then the shared ones, which have
        NO_TOKEN after each piece and up to their end.
    width: L.
    kv_lens: `[S]` int64: the position of each slot's last token.
    salts: `[S + R]` int32: slots and rows of equal numbers share texts; -1: with none. None: no row
        is shared, and no slot.
    has_corpus: whether rows have EVERYONE as their salt."""

    memory: torch.Tensor
    width: int
    kv_lens: torch.Tensor
    salts: torch.Tensor | None = None
    has_corpus: bool = False

    @property
    def texts(self) -> torch.Tensor:
        """`[S, L]`."""
        return self.memory[: len(self.kv_lens) * self.width].view(-1, self.width)

    @property
    def shared(self) -> torch.Tensor:
        """`[R, SHARED_WIDTH]`."""
        return self.memory[len(self.kv_lens) * self.width :].view(-1, SHARED_WIDTH)


class Matches(NamedTuple):
    """What follows the M best matches of the ends of B texts, the best first: drafts `[B, M, K]`,
    and how many of them are proposed `[B, M]`, after the matches there are. lengths `[B]`: tokens
    of the best match; 0: there is none. All int64."""

    drafts: torch.Tensor
    num_drafts: torch.Tensor
    lengths: torch.Tensor


@with_kernel("append_tokens_triton")
def append_tokens(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Appends to the texts of slots `[B]` what made them as long as they are.

    Args:
        texts: `[S, L]` int32. Tokens beyond L are left out.
        slots: `[B]` int64, contiguous.
        kv_lens: `[S]` int64: the position of each text's last token.
        tokens: `[B, W]` int64, contiguous. An invalid token (-1) is stored as 0.
        lens: `[B]` int64, contiguous: how many of these tokens are the text's last ones.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    positions = (kv_lens.index_select(0, slots) + 1 - lens).unsqueeze(1) + columns
    is_new = (columns < lens.unsqueeze(1)) & (positions < texts.shape[1])
    rows, _ = torch.nonzero(is_new, as_tuple=True)
    texts[slots[rows], positions[is_new]] = tokens[is_new].clamp_min(0).to(texts.dtype)


@with_kernel("match_suffixes_triton", argument=1)
def match_suffixes(
    table: TextTable,
    slots: torch.Tensor,
    draft_len: int,
    max_match: int,
    num_matches: int = 1,
    oldest: bool = False,
) -> Matches:
    """For each of slots `[B]` (int64, contiguous) the longest suffixes of its text, of at most
    `max_match` tokens, that also occur earlier in it or in a text that it shares. Among equally
    long ones those in its own text come first, then the last, or the first if `oldest`.

    Drafts are the `draft_len` tokens that follow there. In its own text, a match that overlaps the
    end is continued by the drafts themselves; elsewhere there may be fewer drafts. Where there are
    none, they are the text's last token."""
    firsts = slots * table.width
    ends = firsts + table.kv_lens.index_select(0, slots).clamp_max(table.width - 1)
    numbers, places, rooms = _places_of_last_tokens(table, slots, firsts, ends)
    rooms = torch.minimum(rooms, (ends - firsts)[numbers])
    lengths, alive = torch.zeros_like(places), torch.arange(len(places), device=places.device)
    for back in range(max_match):
        alive = alive[rooms[alive] >= back]
        texts = ends[numbers[alive]]
        alive = alive[table.memory[places[alive] - back] == table.memory[texts - back]]
        if not len(alive):
            break
        lengths[alive] += 1
    is_own = (places >= firsts[numbers]) & (places <= ends[numbers])
    order = LAST_PLACE - places if oldest else places
    scores = (2 * lengths + is_own << PLACE_BITS) + order
    best = _largest(scores, numbers, len(slots), num_matches)
    return _drafts_at(table, best, ends, draft_len, oldest)


def _places_of_last_tokens(
    table: TextTable, slots: torch.Tensor, firsts: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the last tokens of the texts of slots `[B]` occur and are followed by a token: the
    number of the slot, the place in memory, and how many tokens its row has before it; `[N]`
    each. firsts, ends `[B]`: of the texts, in memory."""
    last, lens = table.memory[ends].unsqueeze(1), (ends - firsts).unsqueeze(1)
    own = table.texts.index_select(0, slots)[:, : int(lens.max())]
    is_place = (own == last) & (torch.arange(own.shape[1], device=own.device) < lens)
    numbers, rooms = torch.nonzero(is_place, as_tuple=True)
    found = [(numbers, firsts[numbers] + rooms, rooms)]
    if table.salts is not None:
        for number, slot in enumerate(slots.tolist()):
            for rows, place in _shared_with(table, slot):
                is_place = (rows[:, :-1] == last[number]) & (rows[:, 1:] >= 0)
                which, rooms = torch.nonzero(is_place, as_tuple=True)
                places = place[which] + rooms
                found.append((torch.full_like(places, number), places, rooms))
    numbers, places, rooms = (torch.cat(part) for part in zip(*found, strict=True))
    return numbers, places, rooms


def _shared_with(table: TextTable, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Texts that a slot shares: rows `[N, any]`, and where they begin in memory `[N]`."""
    assert table.salts is not None
    num_slots = len(table.kv_lens)
    is_shared = (table.salts == table.salts[slot]) & (table.salts >= 0)
    rows = torch.nonzero(is_shared | (table.salts == EVERYONE)).squeeze(1)
    for other in rows[rows < num_slots].tolist():
        if other != slot:
            text = table.texts[other, : int(table.kv_lens[other]) + 1].unsqueeze(0)
            yield text, torch.tensor([other * table.width], device=text.device)
    shared = rows[rows >= num_slots] - num_slots
    yield table.shared.index_select(0, shared), len(table.texts.view(-1)) + shared * SHARED_WIDTH


def _largest(
    scores: torch.Tensor, numbers: torch.Tensor, batch_size: int, num_wanted: int
) -> torch.Tensor:
    """`[B, num_wanted]`: the largest scores of each number, in order; 0: there are no more. scores
    and numbers, 0 to B-1: `[N]`."""
    if num_wanted == 1:
        largest = scores.new_zeros(batch_size).scatter_reduce_(0, numbers, scores, "amax")
        return largest.unsqueeze(1)
    order = scores.argsort(descending=True)
    order = order[numbers[order].argsort(stable=True)]
    scores, numbers = scores[order], numbers[order]
    counts = numbers.bincount(minlength=batch_size)
    ranks = torch.arange(len(numbers), device=numbers.device)
    ranks -= (counts.cumsum(0) - counts)[numbers]
    found, is_wanted = scores.new_zeros((batch_size, num_wanted)), ranks < num_wanted
    found[numbers[is_wanted], ranks[is_wanted]] = scores[is_wanted]
    return found


def _row_ends(table: TextTable, places: torch.Tensor) -> torch.Tensor:
    """The last token of the row of each place, or of all rows for a shared one, which has NO_TOKEN
    before."""
    rows = (places // table.width).clamp_max(len(table.kv_lens) - 1)
    ends = rows * table.width + table.kv_lens[rows].clamp_max(table.width - 1)
    return torch.where(places < len(table.texts.view(-1)), ends, len(table.memory) - 1)


def _drafts_at(
    table: TextTable, scores: torch.Tensor, ends: torch.Tensor, draft_len: int, oldest: bool
) -> Matches:
    """scores `[B, M]`; ends `[B]`: of the texts, in memory."""
    places, own_ends = scores & LAST_PLACE, ends.unsqueeze(1)
    starts = (LAST_PLACE - places if oldest else places) + 1
    columns = torch.arange(draft_len, device=scores.device)
    copied = columns % (own_ends + 1 - starts).clamp_min(1).unsqueeze(2)
    at, is_there = starts.unsqueeze(2) + copied, (scores > 0).unsqueeze(2)
    if table.salts is not None:
        is_own = ((scores >> PLACE_BITS) & 1 > 0).unsqueeze(2)
        at = torch.where(is_own, at, starts.unsqueeze(2) + columns)
        row_ends = _row_ends(table, starts).unsqueeze(2)
        is_there = is_there & (is_own | (at <= row_ends))
        at = at.minimum(row_ends)
    drafts = table.memory[torch.where(is_there, at, 0)].to(torch.int64)
    is_there = (is_there & (drafts >= 0)).cumprod(2).bool()
    last = table.memory[own_ends].to(torch.int64).unsqueeze(2)
    lengths = scores[:, 0] >> PLACE_BITS + 1
    return Matches(torch.where(is_there, drafts, last), is_there.sum(2), lengths)


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
        *strided(texts),
        texts.shape[1],
        slots,
        kv_lens,
        tokens,
        lens,
        width,
        triton.next_power_of_2(width),
        **programmatic_launch(slots.device, 1),
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


@triton.jit(do_not_specialize=["stride", "max_len"])
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


@triton.jit
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


@triton.jit(do_not_specialize=["width", "num_slots", "max_match"])
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


@triton.jit(do_not_specialize=["width", "num_slots", "size"])
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
