"""Launches rounds on the device: the target's forward, acceptance, and what the drafter adds.

Nothing here waits for the device. The results are on their way to the host in a `LaunchedRound`;
before that is read, the next round can be launched from the slot state alone.

A round with context chunks is split, and its eager forward reads chunks and generation windows. Or
a few short chunks are a CUDA graph, and the windows follow as a round of their own. First tokens
are sent before anything is drafted after them."""

from functools import partial
from operator import attrgetter
from time import perf_counter

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.device.transfer import DeviceSpan, PinnedBuffers, ToHost, to_device
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.context_graphs import (
    ContextGraphs,
    ContextLimits,
    DummyContexts,
    capture_contexts,
)
from tllm_spec.executor.graphs.slot_graphs import (
    TIMED_KV_LEN,
    GraphKey,
    GraphPool,
    WindowGraphs,
    eager_seconds,
)
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.decode_rounds import DecodeRounds, whole_windows
from tllm_spec.executor.rounds.round_reader import LaunchedRound, joined
from tllm_spec.executor.sampling.logits import LogprobRows, collect_prompt_logprobs
from tllm_spec.executor.sampling.row_group import RowPositions
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.drafter import (
    ContextResult,
    Drafter,
    RoundResult,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.state_recorder import StateRecorder

_num_drafts, _draft_limit = attrgetter("py_num_draft_tokens"), attrgetter("draft_limit")
_adapter = attrgetter("adapter")


class RoundRunner:
    """Launches rounds. `decode` runs batches of generation windows, and the windows of rounds whose
    context chunks are a graph of their own. recorder: of hidden states; None: none are recorded."""

    def __init__(
        self,
        engine: ModelEngine,
        sampler: Sampler,
        drafter: Drafter,
        recorder: StateRecorder | None = None,
    ) -> None:
        self.engine = engine
        self.drafter = drafter
        self.context_graphs: ContextGraphs | None = None
        self._recorder = recorder
        self._sampler, self._slots, self._groups = sampler, sampler.slots, sampler.groups
        self._buffers = PinnedBuffers()
        self.decode = DecodeRounds(engine, sampler, drafter, recorder)

    def launch(self, batch: ScheduledBatch) -> LaunchedRound:
        """Enqueues the round's work; after it the slots hold what the next round needs."""
        logprobs, post_send = LogprobRows(), None
        self._sampler.grammar_masks.begin(batch)
        if self.engine.adapters is not None:
            self.engine.use_adapters(any(map(_adapter, batch.requests())))
        if batch.context_requests:
            to_host, post_send = self._launch_contexts(batch, logprobs)
        else:
            sampled = self.decode.run(batch, logprobs)
            # The graph itself may have sent them.
            to_host = sampled.to_host or self._send(sampled, logprobs)
        self.drafter.launched(batch)
        if self._recorder is not None:
            self._recorder.launched(batch)
        return LaunchedRound(
            batch,
            batch.last_chunk_requests,
            list(map(_num_drafts, batch.generation_requests)),
            to_host,
            logprobs,
            perf_counter() if to_host.is_here else None,
            post_send,
        )

    def _send(self, sampled: SampledTokens, logprobs: LogprobRows) -> ToHost:
        return ToHost([sampled.table(), *logprobs.tensors], self._buffers)

    def _launch_contexts(
        self, batch: ScheduledBatch, logprobs: LogprobRows
    ) -> tuple[ToHost, DeviceSpan | None]:
        """The results on their way to the host, and what the device does in this round after
        sending them; None: nothing."""
        requests = batch.context_requests
        chunks = [
            ContextChunk(
                *(r.slot, r.kv_len, r.tokens[r.kv_len : r.kv_len + r.context_chunk], r.prompt_len)
            )
            for r in requests
        ]
        wants_logprobs = any(r.rules.prompt_logprobs is not None for r in requests)
        if self.context_graphs is not None and not wants_logprobs:
            hidden = self.context_graphs.run(chunks)
            if hidden is not None:
                return self._launch_apart(batch, chunks, hidden, logprobs)
        return self._launch_together(batch, chunks, logprobs, wants_logprobs=wants_logprobs)

    def _launch_apart(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        hidden: torch.Tensor,
        logprobs: LogprobRows,
    ) -> tuple[ToHost, DeviceSpan | None]:
        """The chunks' graph was replayed and left the hidden states of their last rows, `[C, H]`;
        the windows, if any, follow after the drafting, since they overwrite the states that it
        reads."""
        self._start_joining(batch)
        ended, parts = batch.last_chunk_requests, list[SampledTokens]()
        if ended:
            if len(ended) < len(chunks):
                rows = [i for i, r in enumerate(batch.context_requests) if r.is_last_context_chunk]
                hidden = hidden.index_select(0, to_device(rows, hidden.device))
            parts = [self._sample_first(ended, self.engine.compute_logits(hidden), logprobs)]
        if not batch.generation_requests:
            return self._send_then_draft(batch, chunks, parts, None, logprobs)
        self.decode.draft_after_contexts(batch, _result(batch, chunks, parts, None))
        parts.append(self.decode.run(batch, logprobs))
        return self._send(joined(parts, batch.shape.path, hidden.device), logprobs), None

    def _launch_together(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        logprobs: LogprobRows,
        *,
        wants_logprobs: bool,
    ) -> tuple[ToHost, DeviceSpan | None]:
        """One forward of the chunks and, after them, the windows, if there are any."""
        ended, group, windows, read_rows = batch.last_chunk_requests, None, None, None
        if batch.generation_requests:
            group, windows = self.decode.batch_windows(batch)
        hidden = self._forward(batch, chunks, windows, wants_logprobs=wants_logprobs)
        self._start_joining(batch)
        if windows is not None and batch.shape.is_ragged:
            windows, own, read_rows = whole_windows(windows, hidden[len(ended) :])
            hidden = torch.cat((hidden[: len(ended)], own))
        logits = self.engine.compute_logits(hidden)
        parts, result = list[SampledTokens](), None
        if ended:
            parts = [self._sample_first(ended, logits[: len(ended)], logprobs)]
        if group is not None and windows is not None:
            own = logits[len(ended) :]
            result = self.decode.sample(group, windows, batch.shape, own, logprobs, read_rows)
            parts.append(result.sampled)
        return self._send_then_draft(batch, chunks, parts, result, logprobs)

    def _forward(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        windows: Windows | None,
        *,
        wants_logprobs: bool,
    ) -> torch.Tensor:
        """Hidden states of the rows that are sampled, `[R, H]`: the last row of each ended context,
        then all window rows."""
        rows, end = list[int](), 0
        for request in batch.context_requests:
            end += request.context_chunk
            rows += [end - 1] if request.is_last_context_chunk else []
        rows += range(end, end + batch.num_window_rows)
        device = self._slots.device  # there are no rows where all are pieces of prompts
        wanted = (
            to_device(rows, device) if rows else torch.empty(0, dtype=torch.int64, device=device)
        )
        if not wants_logprobs:
            return self.engine.forward(chunks, windows, wanted)
        hidden = self.engine.forward(chunks, windows)
        vocab_size = self.engine.model.config.vocab_size
        collect_prompt_logprobs(
            batch.context_requests, hidden, self.engine.compute_all_logits, vocab_size
        )
        return hidden.index_select(0, wanted)

    def _send_then_draft(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        parts: list[SampledTokens],
        windows: WindowResult | None,
        logprobs: LogprobRows,
    ) -> tuple[ToHost, DeviceSpan | None]:
        """Sends the results, then drafts: first tokens do not wait for drafts. windows: of the
        chunks' forward."""
        to_host = self._send(joined(parts, batch.shape.path, self._slots.device), logprobs)
        span = None if to_host.is_here else DeviceSpan()
        self.decode.draft_after_contexts(batch, _result(batch, chunks, parts, windows))
        if span is not None:
            span.end()
        return to_host, span

    def _start_joining(self, batch: ScheduledBatch) -> None:
        """Writes the rows of the slots that requests were given for this round. A context's forward
        does not read them, so they are written while the device is busy with it."""
        for request in batch.joining:
            self._sampler.start(request)
            self._slots.start(request)

    def _sample_first(
        self, ended: list[LlmRequest], logits: torch.Tensor, logprobs: LogprobRows
    ) -> SampledTokens:
        """The first tokens of contexts that ended. logits `[C, V]`."""
        group = self._groups.get(ended, 1)
        numbers = [len(r.tokens) for r in ended], [r.tokens[-1] for r in ended]
        lens, last_tokens = to_device(numbers, logits.device).unbind(0)
        self._slots.kv_lens[group.slots] = lens
        sampled = self._sampler.sample(group, logits, RowPositions(lens, 0), None, logprobs)
        self._slots.start_generation(group.slots, last_tokens, sampled.new_tokens[:, 0])
        return sampled

    def is_ragged(self, requests: list[LlmRequest], shape: DraftShape) -> bool:
        """Whether the host gives only one row to each request that takes no drafts, in a round with
        drafts of this shape. In a graph, and where drafts may be trees, it does not: all requests
        have whole windows, or the device chooses their rows."""
        if shape.is_ragged or all(map(_draft_limit, requests)):
            return False
        if self._slots.shapes.has_trees or self.drafter.reads_whole_windows:
            return False
        return self.graphs is None or not self.graphs.hold(len(requests), shape)

    def discard_dummy_round(self) -> None:
        """Removes what the latest round left, which had the dummy slot only."""
        self._groups.forget()
        self._slots.reset_dummy()

    @property
    def graphs(self) -> WindowGraphs | None:
        """The graphs of rounds of generation windows."""
        return self.decode.graphs

    def capture_graphs(
        self, keys: list[GraphKey], *, pads: bool, pool: GraphPool | None = None
    ) -> None:
        """Captures the graphs that rounds of generation windows are run as where one of the keys
        fits."""
        graphs = self.decode.capture(keys, pads=pads, pool=pool)
        self.drafter.capture_graphs(graphs.whole, keys)

    def capture_contexts(self, sizes: tuple[int, ...], pool: GraphPool) -> None:
        """Captures the graphs that a few short context chunks are run as, where attention can be
        captured."""
        self.context_graphs = capture_contexts(self.engine, sizes, self._slots.dummy_slot, pool)

    def seconds(self, key: GraphKey) -> float:
        """How long the device takes for a round of dummy requests with empty contexts: the mean of
        a long row of replays; without a graph the best of a few eager rounds. No round may be in
        flight."""
        if self.graphs is not None and key in self.graphs:
            return self.graphs.seconds(key)
        slot_ids = self._slots.dummies(key.batch_size)
        max_kv_len = min(TIMED_KV_LEN, self.decode.max_len)
        run = partial(self.decode.whole, slot_ids, key.shape, key.sampled, max_kv_len)
        return eager_seconds(lambda: run().new_lens)

    def seconds_with_contexts(self, key: GraphKey, limits: ContextLimits) -> float | None:
        """The same for a round in which every request has a long context; None where there is no
        graph, or no room for such contexts."""
        graphs, contexts = self.graphs, DummyContexts(self._slots, self.engine.attention, limits)
        if graphs is None or key not in graphs or not contexts.length(key.batch_size):
            return None
        with contexts.filled(key.batch_size) as renew:
            return graphs.seconds(key, list(range(key.batch_size)), renew)


def _result(
    batch: ScheduledBatch,
    chunks: list[ContextChunk],
    parts: list[SampledTokens],
    windows: WindowResult | None,
) -> RoundResult:
    """parts: of the ended contexts, if there are any, and of windows. windows: of the chunks'
    forward."""
    requests = batch.context_requests
    following = [
        None if r.is_last_context_chunk else r.tokens[r.kv_len + r.context_chunk] for r in requests
    ]
    first_tokens = parts[0].new_tokens[:, 0] if batch.last_chunk_requests else None
    return RoundResult(ContextResult(requests, chunks, following, first_tokens), windows)
