"""The drafter inside the target's forward (one-model path): after acceptance it reads the accepted
tokens and writes the next window into the slots.

Its layers are extra layers of the target's pages: they share block table and page numbers, so
pages, rewinds and prefix reuse need no second book-keeping. Draft rows of rejected tokens are
overwritten by the next round. Everything is a function of device tensors, so that a CUDA graph can
hold it."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers


@dataclass(frozen=True)
class ContextResult:
    """What the target did with context chunks, one of each request. `following`: the prompt token
    behind each chunk, None behind the last one of a context, where `sampled` `[C]` has it (None: no
    context ended)."""

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
    """Who wants to know what came out of a round, right behind the sampling. `in_graph`: as a part
    of the round's graph."""

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
        """A graph has run a round of windows that end at `max_kv_len` at most: news for whoever is
        not in it. The next replay overwrites `sampled`."""
        return

    def forget(self) -> None:
        """The latest round was nobody's."""
        return

    def draft_probs(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """What the drafts of the slots were drawn from, `[B, K, V]` over the target's
        vocabulary."""


class DraftWorker(RoundEnd):
    """Drafts chains. `slots.kv_lens` and the bonus tokens must be the new ones already. What
    windows of one token leave that are not drafted from goes to the `backlog`."""

    in_graph = True

    def __init__(
        self,
        layers: DraftLayers,
        slots: SlotState,
        sampling: DraftSampling,
        backlog: DraftBacklog,
    ) -> None:
        self.net = net = layers.net
        self._layers = layers
        self._backlog = backlog
        self._slots = slots
        self._sampling = sampling
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        # Kept, because to make them would be a launch in every round.
        num_rows = len(slots.kv_lens) * (slots.max_draft_len + 1)
        self._rows_before = torch.arange(-1, num_rows - 1, device=slots.device)
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
        """With `num_drafts` 0 the draft cache is brought up to date, windows perhaps later, and
        nothing else."""
        if windows is not None and windows.width == 1 and not num_drafts:
            first_row = sum(len(chunk.tokens) for chunk in contexts.chunks) if contexts else 0
            self._backlog.store(windows.windows, windows.sampled.new_tokens[:, 0], first_row)
            if contexts is None:
                return
            windows = None
        is_drafting = num_drafts > 0 and len(group.slots) > 0
        state, bound = self._catch_up(contexts, windows, is_drafting)
        if not is_drafting:
            return
        places = self._slots.places(group.slots, num_drafts)
        drafts: list[torch.Tensor] = []
        for step in range(num_drafts):
            if step:
                # The draft before stands at kv_lens + step; see DraftNet.shift for its place in the
                # cache.
                first = places[step - 1 + self.net.shift]
                window = Windows(group.slots, first, drafts[-1].unsqueeze(1), bound + step)
                state = self._layers.forward([], window, state)
            logits = self.net.compute_logits(state)
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
        self, contexts: ContextResult | None, windows: WindowResult | None, is_drafting: bool
    ) -> tuple[torch.Tensor, int]:
        """Reads what the target has just read, one token further. The state of the rows that the
        first draft comes from, `[N, H]`, no rows if nobody is drafting; and a bound of the cache's
        length for the steps after it."""
        chunks, patched, last_rows = self._chunks(contexts)
        shifted = None
        bound = max((chunk.end for chunk in chunks), default=0)
        if windows is not None:
            target = windows.windows
            shifted = replace(
                target,
                first=target.first + self.net.shift if self.net.shift else target.first,
                token_ids=windows.sampled.new_tokens.clamp_min(0),
                max_kv_len=target.max_kv_len + self.net.shift,
            )
            bound = max(bound, shifted.max_kv_len)
        wanted = self._no_rows
        if is_drafting:
            num_rows = sum(len(chunk.tokens) for chunk in chunks)
            wanted = self._drafted_from(last_rows, windows, num_rows)
        return self._layers.forward(chunks, shifted, None, patched, wanted), bound

    def _drafted_from(
        self, last_rows: list[int], windows: WindowResult | None, num_rows: int
    ) -> torch.Tensor:
        """The rows that drafts begin at, `[N]`: the last ones of ended contexts, and behind the
        `num_rows` rows of all chunks each window's row of its last new token."""
        ended = to_device(last_rows, self._slots.device) if last_rows else self._no_rows
        if windows is None:
            return ended
        batch, width = windows.sampled.new_tokens.shape
        rows = self._rows_before[: batch * width : width] + windows.sampled.new_lens
        return torch.cat((ended, rows + num_rows)) if num_rows else rows

    def _chunks(
        self, contexts: ContextResult | None
    ) -> tuple[list[ContextChunk], tuple[list[int], torch.Tensor] | None, list[int]]:
        """The draft's chunks, with 0 where a sampled token belongs; which rows those are, with the
        tokens; and the last rows of ended contexts (the same rows)."""
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
