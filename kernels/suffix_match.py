"""Drafts that follow an earlier occurrence of the end of a text: the texts of slots on the device,
texts that slots share, and the longest matches of a text's end. On CUDA Triton kernels, elsewhere
the plain-torch references."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.kernels.dispatch import with_kernel

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


@with_kernel("suffix_match_triton.append_tokens_triton")
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


@with_kernel("suffix_match_triton.match_suffixes_triton", argument=1)
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
    table: TextTable,
    scores: torch.Tensor,
    ends: torch.Tensor,
    draft_len: int,
    oldest: bool,
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
