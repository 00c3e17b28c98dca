"""The drafter inside the target's forward (one-model path): after acceptance it reads the accepted tokens and writes
the next window into the slots.

Its layers are extra layers of the target's pages: they share block table and page numbers, so pages, rewinds and prefix
reuse need no second book-keeping. Draft rows of rejected tokens are overwritten by the next round. Everything is a
function of device tensors, so that a CUDA graph can hold it.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.draft_layers import DraftLayers
from tllm_spec.executor.transfer import to_device


@dataclass(frozen=True)
class ContextResult:
    """What the target did with context chunks, one of each request. `following`: the prompt token behind each chunk,
    None behind the last one of a context, where `sampled` `[C]` has it (None: no context ended)."""

    requests: list[LlmRequest]
    chunks: list[ContextChunk]
    following: list[int | None]
    sampled: torch.Tensor | None


@dataclass(frozen=True)
class WindowResult:
    """The windows that the target verified, and what came out of them."""

    windows: Windows
    sampled: SampledTokens

    @property
    def width(self) -> int:
        return self.sampled.new_tokens.shape[1]


class RoundEnd(Protocol):
    """Who wants to know what came out of a round, right behind the sampling. `in_graph`: as a part of the round's
    graph."""

    in_graph: bool

    def draft(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        num_drafts: int,
    ) -> None:
        """group: the requests that get drafts, ended contexts before windows, one row each."""

    def replayed(self, group: RowGroup, sampled: SampledTokens, max_kv_len: int) -> None:
        """A graph has run a round of windows that end at `max_kv_len` at most: news for whoever is not in it. The next
        replay overwrites `sampled`."""
        return

    def draft_probs(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """What the drafts of the slots were drawn from, `[B, K, V]` over the target's vocabulary."""


class DraftWorker(RoundEnd):
    """Drafts chains. `slots.kv_lens` and the bonus tokens must be the new ones already. What windows of one token leave
    that are not drafted from goes to the `backlog`; None: it is read at once."""

    in_graph = True

    def __init__(
        self,
        layers: DraftLayers,
        slots: SlotState,
        sampling: DraftSampling,
        backlog: DraftBacklog | None = None,
    ) -> None:
        self.net = net = layers.net
        self._layers = layers
        self._backlog = backlog
        self._slots = slots
        self._sampling = sampling
        self._probs: torch.Tensor | None = None
        if sampling.keeps_probs:
            size = (len(slots.kv_lens), slots.max_draft_len, sampling.width(net.vocab_size))
            self._probs = torch.zeros(size, dtype=torch.float32, device=slots.device)

    def draft(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        num_drafts: int,
    ) -> None:
        """With `num_drafts` 0 the draft cache is brought up to date, windows perhaps later, and nothing else."""
        is_put_off = not num_drafts and windows is not None and windows.width == 1
        if self._backlog is not None and windows is not None and is_put_off:
            first_row = sum(len(chunk.tokens) for chunk in contexts.chunks) if contexts else 0
            self._backlog.store(windows.windows, windows.sampled.new_tokens[:, 0], first_row)
            if contexts is None:
                return
            windows = None
        features, state, bound = self._catch_up(contexts, windows)
        if not num_drafts or not len(group.slots):
            return
        kv_lens = self._slots.kv_lens.index_select(0, group.slots)
        places = kv_lens + torch.arange(num_drafts + 1, device=kv_lens.device).unsqueeze(1)  # [K + 1, N]
        drafts: list[torch.Tensor] = []
        for step in range(num_drafts):
            if step:
                # The draft before stands at kv_lens + step; see DraftNet.shift for its place in the cache.
                first = places[step - 1 + self.net.shift]
                window = Windows(group.slots, first, drafts[-1].unsqueeze(1), bound + step)
                features, state = self._layers.forward([], window, state)
            logits = self.net.compute_logits(features)
            tokens, probs = self._sampling.choose(group, step, logits, places[1])
            drafts.append(tokens)
            if probs is not None:
                assert self._probs is not None
                self._probs[group.slots, step] = probs
        self._slots.write_drafts(group.slots, torch.stack(drafts, dim=1))

    def draft_probs(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        assert self._probs is not None
        return self._sampling.spread(self._probs.index_select(0, slot_ids)[:, :num_drafts])

    def _catch_up(
        self, contexts: ContextResult | None, windows: WindowResult | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Reads what the target has just read, one token further. Features and state of the rows that the first draft
        comes from, `[N, H]`; and a bound of the cache's length for the steps after it."""
        chunks, patched, last_rows = self._chunks(contexts)
        shifted = None
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        rows = [to_device(last_rows, self._slots.device)] if last_rows else []
        bound = max((chunk.end for chunk in chunks), default=0)
        if windows is not None:
            target, sampled = windows.windows, windows.sampled
            shifted = replace(
                target,
                first=target.first + self.net.shift if self.net.shift else target.first,
                token_ids=sampled.new_tokens.clamp_min(0),
                max_kv_len=target.max_kv_len + self.net.shift,
            )
            bound = max(bound, shifted.max_kv_len)
            batch, width = sampled.new_tokens.shape
            before = num_rows - 1  # the row before each window's first
            starts = torch.arange(before, before + batch * width, width, device=self._slots.device)
            rows.append(starts + sampled.new_lens)
        features, state = self._layers.forward(chunks, shifted, None, patched)
        if not rows:
            return features[:0], state[:0], bound
        wanted = rows[0] if len(rows) == 1 else torch.cat(rows)
        of_rows = features.index_select(0, wanted)
        return of_rows, of_rows if state is features else state.index_select(0, wanted), bound

    def _chunks(
        self, contexts: ContextResult | None
    ) -> tuple[list[ContextChunk], tuple[list[int], torch.Tensor] | None, list[int]]:
        """The draft's chunks, with 0 where a sampled token belongs; which rows those are, with the tokens; and the last
        rows of ended contexts (the same rows)."""
        if contexts is None:
            return [], None, []
        chunks: list[ContextChunk] = []
        last_rows: list[int] = []
        end = 0
        for chunk, following in zip(contexts.chunks, contexts.following, strict=True):
            chunks.append(self.net.draft_chunk(chunk, following))
            end += len(chunks[-1].tokens)
            if following is None:
                last_rows.append(end - 1)
        if contexts.sampled is None:
            return chunks, None, []
        return chunks, (last_rows, contexts.sampled.clamp_min(0)), last_rows
