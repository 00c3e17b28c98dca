"""The device's part of a round: target forward, acceptance, and drafting where the drafter is a
part of the forward.

Nothing here waits for the device. What the host wants to know is on its way to it in a
`LaunchedRound`; until that is read, the next round can be launched from the slot state alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from time import perf_counter

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.context_graphs import ContextGraphs, capture_contexts
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.dummy_contexts import ContextLimits, DummyContexts
from tllm_spec.executor.graphs.eager_timing import TIMED_KV_LEN, eager_seconds
from tllm_spec.executor.graphs.graph_pool import GraphPool
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.device_span import DeviceSpan
from tllm_spec.executor.rounds.launched_round import LaunchedRound
from tllm_spec.executor.rounds.transfer import Places, ToHost, to_device
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.prompt_logprobs import collect_prompt_logprobs
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.worker import ContextResult, RoundEnd, WindowResult
from tllm_spec.kernels.row_copies import gather_rows

_num_ready, _num_drafts = attrgetter("num_drafts_ready"), attrgetter("py_num_draft_tokens")
_graph_samples, _slot = attrgetter("graph_samples"), attrgetter("slot")


class RoundRunner:
    """Runs batches. `round_end` is the drafter inside the forward (one-model path), or whoever
    drafts from what the forward left behind, or None. `backlog`: what it has put off, if it
    does."""

    def __init__(
        self,
        engine: ModelEngine,
        sampler: Sampler,
        round_end: RoundEnd | None,
        backlog: DraftBacklog | None = None,
    ) -> None:
        self.engine = engine
        self.round_end = round_end
        self._backlog = backlog
        self.graphs: CudaGraphs | None = None
        self.forward_graphs: SlotGraphs[torch.Tensor] | None = None
        self._hidden = torch.empty(0)  # [T, H], what each forward graph leaves
        self.context_graphs: ContextGraphs | None = None
        self._sampler = sampler
        self._slots = sampler.slots
        self._groups = sampler.groups
        self._places = Places()

    def launch(self, batch: ScheduledBatch) -> LaunchedRound:
        """Enqueues the round's work; the slots then hold what the next round needs."""
        if self._backlog is not None:
            self._backlog.prepare(batch)
        logprobs = LogprobRows()
        ended = batch.last_chunk_requests
        if batch.context_requests:
            chunks = _chunks(batch)
            sampled = self._run_apart(batch, chunks, ended, logprobs)
            sampled = sampled or self._run_mixed(batch, chunks, ended, logprobs)
        else:
            sampled = self._replay(batch) or self._run_windows(batch, logprobs)
        to_host = sampled.to_host or self._sent(sampled, logprobs)
        self._groups.end_round()
        if self._backlog is not None:
            self._backlog.note(batch)
        num_steps = self._num_steps(batch)
        return LaunchedRound(
            batch,
            ended,
            list(map(_num_drafts, batch.generation_requests)),
            num_steps,
            num_steps if self.round_end is not None else batch.num_asked,
            to_host,
            logprobs,
            perf_counter() if to_host.is_here else None,
            sampled.behind,
        )

    def forget_round(self) -> None:
        """The latest round was nobody's: it had the dummy slot only."""
        self._groups.forget()
        self._slots.reset_dummy()
        if self.round_end is not None:
            self.round_end.forget()

    def _num_steps(self, batch: ScheduledBatch) -> int:
        """Drafts that a round left behind are as many as it was told to make, whatever this one
        verifies."""
        if self.round_end is None:
            return batch.draft_len
        return min(batch.draft_len, max(map(_num_ready, batch.generation_requests), default=0))

    def capture_graphs(
        self,
        keys: list[GraphKey],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool,
        pool: GraphPool | None = None,
    ) -> None:
        """From now on a round of generation windows that fits one of the keys is one graph launch,
        or where a request's rules need more than such a graph knows, at least its forward is."""
        graphs = CudaGraphs(self._generate_for, dummy_slot, device, pads=pads, pool=pool)
        graphs.capture(keys)
        forwards, model = graphs.beside(self._forward_for), self.engine.model
        num_rows = max((key.num_tokens for key in keys), default=0)
        self._hidden = torch.empty(
            (num_rows, model.config.hidden_size), dtype=model.dtype, device=device
        )
        forwards.capture({replace(key, sampled=False) for key in keys})
        self.graphs, self.forward_graphs = graphs, forwards
        if self._backlog is not None:
            self._backlog.capture_graphs(graphs, keys)

    def capture_contexts(self, sizes: tuple[int, ...], dummy_slot: int, pool: GraphPool) -> None:
        """From now on a few short context chunks are one graph launch, where attention can be
        captured."""
        self.context_graphs = capture_contexts(self.engine, sizes, dummy_slot, pool)

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """How long the device takes for a generation round with nothing but dummies: in a long row
        of replays; without a graph the best of a few."""
        if self.graphs is not None and key in self.graphs:
            return self.graphs.seconds(key)
        slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)
        round_of = partial(self._generate_for, slot_ids, key.draft_len, key.sampled, TIMED_KV_LEN)
        return eager_seconds(lambda: round_of().new_lens)

    def seconds_with_contexts(self, key: GraphKey, limits: ContextLimits) -> float | None:
        """The same where every request has a context. None where there is no graph, or no place for
        contexts."""
        num_pages = self.engine.backend.pool.num_pages
        contexts = DummyContexts(self._slots, self.engine.rows, num_pages, limits)
        if self.graphs is None or key not in self.graphs or not contexts.length(key.batch_size):
            return None
        with contexts.filled(key.batch_size) as renew:
            return self.graphs.seconds(key, list(range(key.batch_size)), renew)

    def _generate_for(
        self,
        slot_ids: torch.Tensor,
        draft_len: int,
        is_sampled: bool,
        max_kv_len: int | None = None,
    ) -> SampledTokens:
        """A round from nothing but the slots. max_kv_len: of them; None: the longest that there can
        be."""
        self._slots.reset_dummy()
        group = self._groups.of_slots(slot_ids, 1 + draft_len, sampled=is_sampled)
        in_graph = self.round_end is not None and self.round_end.in_graph
        drafting = group.one_row_each() if in_graph else None
        longest = self.engine.rows.max_len
        max_kv_len = longest if max_kv_len is None else min(max_kv_len, longest)
        return self._generate(group, drafting, max_kv_len, draft_len, None, LogprobRows())

    def _forward_for(
        self, slot_ids: torch.Tensor, draft_len: int, is_sampled: bool
    ) -> torch.Tensor:
        """Hidden states of a round's windows from nothing but the slots, `[B * (K+1), H]`: the same
        for every way of sampling."""
        self._slots.reset_dummy()
        hidden = self.engine.forward(
            [], self._windows(slot_ids, 1 + draft_len, self.engine.rows.max_len)
        )
        return self._hidden[: len(hidden)].copy_(hidden)

    def _replay(self, batch: ScheduledBatch) -> SampledTokens | None:
        requests = batch.generation_requests
        needed = set(map(_graph_samples, requests))
        if self.graphs is None or None in needed:
            return None
        sampled = self.graphs.replay(list(map(_slot, requests)), batch.draft_len, True in needed)
        if sampled is not None and self.round_end is not None and not self.round_end.in_graph:
            self.round_end.replayed(self._groups.get(requests, 1), sampled, _longest(batch))
        return sampled

    def _run_windows(self, batch: ScheduledBatch, logprobs: LogprobRows) -> SampledTokens:
        """Sampling, and what follows it, without a graph."""
        requests = batch.generation_requests
        group = self._groups.get(requests, batch.window)
        drafting = self._groups.get(requests, 1) if self.round_end else None
        hidden, num_new_drafts = self._replay_forward(batch), batch.num_new_drafts
        return self._generate(
            group, drafting, _longest(batch), num_new_drafts, batch.draft_probs, logprobs, hidden
        )

    def _replay_forward(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Hidden states of the windows, `[B * (K+1), H]`; the next replay of any graph overwrites
        them."""
        if self.forward_graphs is None:
            return None
        slots = list(map(_slot, batch.generation_requests))
        captured = self.forward_graphs.run(slots, batch.draft_len, False)
        return None if captured is None else captured.result[: len(slots) * batch.window]

    def _generate(
        self,
        group: RowGroup,
        drafting: RowGroup | None,
        max_kv_len: int,
        num_new_drafts: int,
        draft_probs: torch.Tensor | None,
        logprobs: LogprobRows,
        hidden: torch.Tensor | None = None,
    ) -> SampledTokens:
        """One round of generation windows, from slots to slots: this is what a CUDA graph captures.
        `drafting` has the group's requests with one row each; None: nobody drafts here. hidden: of
        a forward that was done already."""
        windows = self._windows(group.slots, group.window, max_kv_len)
        if hidden is None:
            hidden = self.engine.forward([], windows)
        logits = self.engine.compute_logits(hidden)
        probs = self._draft_probs(group, draft_probs)
        sampled = self._sampler.sample_windows(group, logits, windows.first, probs, logprobs)
        if self.round_end is not None and drafting is not None:
            self.round_end.draft(None, WindowResult(windows, sampled), drafting, num_new_drafts)
        return sampled

    def _run_mixed(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        ended: list[LlmRequest],
        logprobs: LogprobRows,
    ) -> SampledTokens:
        """Context chunks, with or without generation windows behind them."""
        windows, group = None, None
        if batch.generation_requests:
            group = self._groups.get(batch.generation_requests, batch.window)
            windows = self._windows(group.slots, group.window, _longest(batch))
        wanted = _sampled_rows(batch, self._slots.device)
        if _wants_prompt_logprobs(batch):
            hidden = self.engine.forward(chunks, windows)
            collect_prompt_logprobs(batch.context_requests, hidden, self.engine.compute_logits)
            hidden = hidden.index_select(0, wanted)
        else:
            hidden = self.engine.forward(chunks, windows, wanted)
        self._start(batch)
        logits = self.engine.compute_logits(hidden)
        parts = self._sample_contexts(ended, logits[: len(ended)], logprobs) if ended else []
        result = None
        if group is not None and windows is not None:
            probs = self._draft_probs(group, batch.draft_probs)
            of_windows = logits[len(ended) :]
            parts.append(
                self._sampler.sample_windows(group, of_windows, windows.first, probs, logprobs)
            )
            result = WindowResult(windows, parts[-1])
        sampled = _joined(parts, batch.window, hidden.device)
        draft = partial(self._draft_after_contexts, batch, chunks, ended, parts, result)
        return self._send_and_then(draft, sampled, logprobs)

    def _run_apart(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        ended: list[LlmRequest],
        logprobs: LogprobRows,
    ) -> SampledTokens | None:
        """Context chunks by a graph, then generation windows as in a round of their own. None where
        that cannot be: no graph fits, or somebody reads later what the windows would overwrite."""
        reads_later = self.round_end is not None and not self.round_end.in_graph
        if self.context_graphs is None or _wants_prompt_logprobs(batch):
            return None
        if batch.generation_requests and reads_later:
            return None
        hidden = self.context_graphs.run(chunks)
        if hidden is None:
            return None
        self._start(batch)
        parts: list[SampledTokens] = []
        if ended:
            if len(ended) < len(chunks):
                places = [
                    i for i, r in enumerate(batch.context_requests) if r.is_last_context_chunk
                ]
                hidden = hidden.index_select(0, to_device(places, hidden.device))
            parts = self._sample_contexts(ended, self.engine.compute_logits(hidden), logprobs)
        draft = partial(self._draft_after_contexts, batch, chunks, ended, parts, None)
        if not batch.generation_requests:
            return self._send_and_then(draft, _joined(parts, batch.window, hidden.device), logprobs)
        draft()  # at once: the windows overwrite what it reads
        parts.append(self._replay(batch) or self._run_windows(batch, logprobs))
        return _joined(parts, batch.window, hidden.device)

    def _send_and_then(
        self, draft: Callable[[], None], sampled: SampledTokens, logprobs: LogprobRows
    ) -> SampledTokens:
        """So that first tokens do not wait for the drafts behind them."""
        to_host = self._sent(sampled, logprobs)
        if self.round_end is None or to_host.is_here:
            draft()
            return replace(sampled, to_host=to_host)
        behind = DeviceSpan()
        draft()
        behind.end()
        return replace(sampled, to_host=to_host, behind=behind)

    def _sent(self, sampled: SampledTokens, logprobs: LogprobRows) -> ToHost:
        return ToHost([sampled.side_by_side(), *logprobs.tensors], self._places)

    def _start(self, batch: ScheduledBatch) -> None:
        """Rows of the slots that requests were given for this round. Nobody reads them before a
        context has been run, so they are written while the device is busy with it."""
        for request in batch.joining:
            self._sampler.start(request)
            self._slots.start(request)

    def _draft_after_contexts(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        ended: list[LlmRequest],
        parts: list[SampledTokens],
        result: WindowResult | None,
    ) -> None:
        """result: of windows that were in the same forward."""
        if self.round_end is None:
            return
        requests = batch.context_requests
        following = [
            None if r.is_last_context_chunk else r.tokens[r.kv_len + r.context_chunk]
            for r in requests
        ]
        sampled = parts[0].new_tokens[:, 0] if ended else None
        contexts = ContextResult(requests, chunks, following, sampled)
        drafting = self._groups.get(
            ended + (batch.generation_requests if result is not None else []), 1
        )
        is_wanted = result is not None or batch.drafts_after_contexts
        self.round_end.draft(contexts, result, drafting, batch.num_new_drafts if is_wanted else 0)

    def _windows(self, slot_ids: torch.Tensor, width: int, max_kv_len: int) -> Windows:
        return Windows(
            slots=slot_ids,
            first=gather_rows(self._slots.kv_lens, slot_ids),
            token_ids=gather_rows(self._slots.window[:, :width], slot_ids),
            max_kv_len=max_kv_len,
        )

    def _draft_probs(self, group: RowGroup, given: torch.Tensor | None) -> torch.Tensor | None:
        if self.round_end is None or not self._sampler.rejection or group.window == 1:
            return given
        return self.round_end.draft_probs(group.slots, group.window - 1)

    def _sample_contexts(
        self, ended: list[LlmRequest], logits: torch.Tensor, logprobs: LogprobRows
    ) -> list[SampledTokens]:
        group = self._groups.get(ended, 1)
        numbers = (
            [request.num_tokens for request in ended],
            [request.tokens[-1] for request in ended],
        )
        lens, tails = to_device(numbers, logits.device).unbind(0)
        self._slots.kv_lens[group.slots] = lens
        return [self._sampler.sample_contexts(group, logits, tails, logprobs)]


def _chunks(batch: ScheduledBatch) -> list[ContextChunk]:
    return [
        ContextChunk(r.slot, r.kv_len, r.tokens[r.kv_len : r.kv_len + r.context_chunk])
        for r in batch.context_requests
    ]


def _wants_prompt_logprobs(batch: ScheduledBatch) -> bool:
    return any(request.rules.prompt_logprobs is not None for request in batch.context_requests)


def _longest(batch: ScheduledBatch) -> int:
    """Upper bound of the KV lengths behind the round's windows."""
    return max(request.num_tokens_bound for request in batch.generation_requests) + batch.draft_len


def _sampled_rows(batch: ScheduledBatch, device: torch.device) -> torch.Tensor:
    """`[R]`: the last row of each ended context, then all window rows."""
    rows: list[int] = []
    end = 0
    for request in batch.context_requests:
        end += request.context_chunk
        rows += [end - 1] if request.is_last_context_chunk else []
    rows += range(end, end + len(batch.generation_requests) * batch.window)
    if not rows:  # pieces of prompts only
        return torch.empty(0, dtype=torch.int64, device=device)
    return to_device(rows, device)


def _joined(parts: list[SampledTokens], width: int, device: torch.device) -> SampledTokens:
    """All requests' results as one, rows padded to the width of the windows."""
    if not parts:  # chunks of contexts only, and none of them the last
        empty = torch.empty((0, width), dtype=torch.int64, device=device)
        return SampledTokens(empty, empty[:, 0])
    tokens = [
        torch.nn.functional.pad(p.new_tokens, (0, width - p.new_tokens.shape[1])) for p in parts
    ]
    return SampledTokens(torch.cat(tokens), torch.cat([p.new_lens for p in parts]))
