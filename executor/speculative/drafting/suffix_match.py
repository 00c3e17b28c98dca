"""Drafts from texts: what followed the longest matches of the end of the request's text, in that
text or in those that it shares.

The texts of all slots are on the device, so that rounds overlap and a CUDA graph holds the search.
The host sends a text when its context ends; each round adds what it emitted."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.config.option_checks import check_text
from tllm_spec.config.text_search import SHARED_WIDTH, TextSearch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.resources.interface import NO_SALT, SharedTexts
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.drafter import (
    ContextResult,
    Drafter,
    RoundResult,
    When,
)
from tllm_spec.kernels.drafts.draft_sources import (
    MATCH,
    NETWORK,
    PRIOR,
    DraftSources,
    await_drafts,
    choose_drafts,
    observe_drafts,
)
from tllm_spec.kernels.drafts.match_branches import add_match
from tllm_spec.kernels.drafts.path_trees import path_trees
from tllm_spec.kernels.drafts.suffix_match import (
    EVERYONE,
    NO_TOKEN,
    Matches,
    TextTable,
    append_tokens,
    match_suffixes,
)
from tllm_spec.kernels.slots.accept import Drafts, DraftTree
from tllm_spec.text.tokenizer import Tokenizer

# A file of texts that drafts are copied from, for every request.


def read_corpus(
    corpus: tuple[str, int] | None, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """The tokens of each text; corpus: as in `TextSearch`, None has no texts. Raises ValueError if
    the file is missing or has anything else, no text, or too many tokens."""
    if corpus is None:
        return []
    path, max_tokens = corpus
    name, found, number = f"external_corpus_path = {path!r}", list[list[int]](), 0
    for line, tokens in _texts(name, path, tokenizer):
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"{name}: line {line} has the token id {outside}; ids are 0 to {vocab_size - 1}"
            )
        found.append(tokens)
        number += len(tokens)
        if number > max_tokens:
            raise ValueError(
                f"{name} has more tokens than external_corpus_max_tokens = {max_tokens}"
            )
    if not number:
        raise ValueError(f"{name} has no text")
    return found


def _texts(name: str, path: str, tokenizer: Tokenizer | None) -> Iterator[tuple[int, list[int]]]:
    """The number of each line, and its tokens."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _tokens(f"{name}: line {number}", line, tokenizer)


def _tokens(name: str, line: str, tokenizer: Tokenizer | None) -> list[int]:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if isinstance(text, list) and all(type(token) is int for token in text):
        return text
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a JSON string, or a list of token ids")
    if tokenizer is None:
        raise ValueError(f"{name} is text, which skip_tokenizer_init leaves without a tokenizer")
    check_text(text, name)
    return tokenizer.encode(text, add_special_tokens=False)


MAX_PATHS = 8  # matches that a tree is made of, at most


class SuffixMatch(Drafter):
    """Proposes chains, or trees of several matches. Texts have at most `max_len` tokens. corpus:
    rows of texts for every request (`rows_of`). `shared`: fills the texts that requests share;
    None: they share none."""

    when = When.GRAPH
    causes = "the texts repeat nothing of what came before"

    def __init__(
        self, slots: SlotState, max_len: int, search: TextSearch, corpus: Sequence[list[int]] = ()
    ) -> None:
        self._slots, self._search = slots, search
        num_slots, num_own = len(slots.kv_lens), len(slots.kv_lens) + search.num_shared
        num_rows = num_own + len(corpus)
        size = self.num_bytes(num_slots, max_len, search, len(corpus)) // torch.int32.itemsize
        memory = torch.zeros(size, dtype=torch.int32, device=slots.device)
        salts = torch.full((num_rows,), NO_SALT, dtype=torch.int32, device=slots.device)
        salts[num_own:] = EVERYONE
        own = salts if num_rows > num_slots else None
        self._table = TextTable(memory, max_len, slots.kv_lens, own, bool(corpus))
        self._table.shared.fill_(NO_TOKEN)
        for row, text in zip(self._table.shared[search.num_shared :], corpus, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        has_pool = search.num_shared > 0
        self.shared = SharedTexts(self._table, search.num_shared) if has_pool else None
        self.resources = () if self.shared is None else (self.shared,)

    @staticmethod
    def num_bytes(num_slots: int, max_len: int, search: TextSearch, num_corpus: int) -> int:
        """Device memory of the texts. num_corpus: rows of the corpus."""
        size = num_slots * max_len + (search.num_shared + num_corpus) * SHARED_WIDTH
        return size * torch.int32.itemsize

    def propose(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> Drafts | None:
        self.read(seen, group)
        if shape == NO_DRAFTS or not len(group.slots):
            return None
        if shape.is_tree:
            paths = self.matches(group, shape, MAX_PATHS)
            return path_trees(paths.drafts, paths.num_drafts, shape.num_nodes, shape.topk)
        matches = self.matches(group, shape)
        return Drafts(matches.drafts[:, 0], matches.num_drafts[:, 0])

    def read(self, seen: RoundResult, group: RowGroup) -> None:
        """Adds to the texts what was emitted."""
        contexts, windows = seen
        if contexts is not None and contexts.first_tokens is not None:
            self._start(contexts, contexts.first_tokens, group.slots)
        if windows is not None:
            slots, sampled, kv_lens = windows.windows.slots, windows.sampled, self._slots.kv_lens
            append_tokens(self._table.texts, slots, kv_lens, sampled.new_tokens, sampled.new_lens)

    def matches(self, group: RowGroup, shape: DraftShape, number: int = 1) -> Matches:
        """What follows that many matches of the ends of the group's texts, one row each."""
        search = self._search
        how = (shape.depth, search.max_match, number, search.oldest)
        return match_suffixes(self._table, group.slots, *how)

    def _start(
        self, contexts: ContextResult, first_tokens: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """The texts of requests whose context ended, `[C]`, which have the first of the slots."""
        texts = self._table.texts
        for request, following in zip(contexts.requests, contexts.following, strict=True):
            if following is None:
                text = torch.frombuffer(array("i", request.tokens), dtype=torch.int32)
                to_device(text, self._slots.device, texts[request.slot, : len(text)])
                if self.shared is not None:
                    self.shared.start(request)
        tokens = first_tokens.contiguous().unsqueeze(1)
        lens = torch.ones_like(first_tokens)
        append_tokens(texts, slots[: len(tokens)], self._slots.kv_lens, tokens, lens)


# Drafts from two sources: a draft network, and the match of the text's end. Of chains each request
# has the one of which more is expected to be accepted; a tree has the likeliest of both.


NETWORK_RATE = 0.6  # of drafts that are right, before any was seen
NUM_CLASSES = 17  # of match lengths: none, 1 to 15 tokens, and more


def new_sources(
    num_slots: int, max_draft_len: int, threshold: int | None, device: torch.device
) -> DraftSources:
    """Without a threshold a match of n tokens begins with n right drafts of n + 2."""
    num_classes = NUM_CLASSES if threshold is None else threshold + 1
    lengths = torch.arange(num_classes, device=device)
    priors = torch.stack((torch.full((num_classes,), NETWORK_RATE, device=device),) * 2, dim=1)
    priors[:, MATCH] = lengths / (lengths + 2)
    takes_match = torch.zeros((num_classes, max_draft_len + 1), dtype=torch.int32, device=device)
    if threshold is None:
        takes_match[1:] = (priors[1:, MATCH] > priors[1:, NETWORK]).unsqueeze(1)
    else:
        takes_match[threshold:] = 1
    size = num_classes, 2, max_draft_len, 2
    return DraftSources(
        pending=torch.full((num_slots, 2, max_draft_len), -1, dtype=torch.int32, device=device),
        choices=torch.zeros((num_slots, 2), dtype=torch.int32, device=device),
        counts=torch.zeros(size, dtype=torch.int32, device=device),
        priors=priors * PRIOR,
        takes_match=takes_match,
        totals=torch.zeros((num_classes, 2, 2), dtype=torch.int64, device=device),
    )


class DraftChoice:
    """Adds the match's drafts to those of a network.

    threshold: a match of so many tokens or more is taken; None: what matches of each length are
    worth is learned from the rounds."""

    def __init__(self, match: SuffixMatch, slots: SlotState, threshold: int | None) -> None:
        self._match, self._learns = match, threshold is None
        size = len(slots.kv_lens), slots.max_draft_len
        self._sources = new_sources(*size, threshold, slots.device)

    def read(self, seen: RoundResult, group: RowGroup) -> None:
        """Sees what was emitted, by both sources' latest drafts. group: ended contexts first."""
        contexts, windows = seen
        self._match.read(seen, group)
        if contexts is not None and contexts.first_tokens is not None:
            started = group.slots[: len(contexts.first_tokens)]
            self._sources.pending.index_fill_(0, started, -1)  # of the request before
        # Of windows without drafts none are pending, or those that a change of tier has left: the
        # next drafts replace them.
        if windows is not None and windows.shape != NO_DRAFTS:
            slots, sampled = windows.windows.slots, windows.sampled
            parts = sampled.new_tokens, sampled.new_lens
            observe_drafts(self._sources, slots, *parts, self._learns)

    def choose(self, drafts: Drafts, group: RowGroup, shape: DraftShape) -> Drafts:
        """drafts: the network's, of this shape, for the group, one row each."""
        found, sources = self._match.matches(group, shape), self._sources
        match, lens = found.drafts.squeeze(1), found.num_drafts.squeeze(1)
        if isinstance(drafts, DraftTree):
            own = group.slots, drafts, match, lens, found.lengths
            return add_match(sources, *own, self._learns)
        both = drafts.tokens, match, found.lengths
        return Drafts(choose_drafts(sources, group.slots, *both))

    def copy(self, group: RowGroup, shape: DraftShape) -> Drafts:
        """The match's drafts alone, for the group, one row each."""
        found, sources = self._match.matches(group, shape), self._sources
        drafts, lens = found.drafts.squeeze(1), found.num_drafts.squeeze(1)
        classes = found.lengths.clamp_max(len(sources.takes_match) - 1)
        if not self._learns:
            lens = lens * sources.takes_match[:, shape.depth][classes]
        pending = drafts.where(lens.unsqueeze(1) > 0, -1)
        await_drafts(sources, group.slots, torch.full_like(drafts, -1), pending)
        chosen = torch.full_like(classes, MATCH)
        sources.choices[group.slots] = torch.stack((classes, chosen), dim=1).to(torch.int32)
        return Drafts(drafts, lens)

    def state(self) -> Mapping[str, Any]:
        totals = self._sources.totals.sum(dim=0).tolist()
        names = ("rounds", "accepted_tokens")
        by_source = {
            name: dict(zip(names, totals[source], strict=True))
            for name, source in (("network", NETWORK), ("match", MATCH))
        }
        return {"draft_sources": by_source}


def copied(choice: DraftChoice | None, group: RowGroup, shape: DraftShape) -> Drafts:
    """Drafts of matches alone. Only with `choice` are there shapes of copied drafts."""
    assert choice is not None
    return choice.copy(group, shape)
