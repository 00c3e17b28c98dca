"""Launches rounds on the device: the target's forward, acceptance, and what the drafter adds.

Nothing here waits for the device. The results are on their way to the host in a `LaunchedRound`;
before that is read, the next round can be launched from the slot state alone."""

from functools import partial
from operator import attrgetter
from time import perf_counter

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.graphs.context_graphs import ContextLimits, DummyContexts, capture_contexts
from tllm_spec.executor.graphs.slot_graphs import (
    TIMED_KV_LEN,
    GraphKey,
    GraphPool,
    WindowGraphs,
    eager_seconds,
)
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.context_rounds import ContextRounds
from tllm_spec.executor.rounds.decode_rounds import DecodeRounds
from tllm_spec.executor.rounds.decode_step import DecodeStep
from tllm_spec.executor.rounds.launched_round import LaunchedRound
from tllm_spec.executor.rounds.result_sender import ResultSender, SentResults
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.round_end import RoundEnd

_num_drafts, _draft_limit = attrgetter("py_num_draft_tokens"), attrgetter("draft_limit")


class RoundRunner:
    """Launches rounds. `decode` runs batches of generation windows, `contexts` those with context
    chunks; `round_end` is the drafter's part."""

    def __init__(self, engine: ModelEngine, sampler: Sampler, round_end: RoundEnd) -> None:
        self.engine = engine
        self.round_end = round_end
        self._slots, self._groups = sampler.slots, sampler.groups
        self._grammar_masks = sampler.grammar_masks
        self._sender = ResultSender()
        self._step = step = DecodeStep(engine, sampler, round_end)
        self.decode = DecodeRounds(step)
        self.contexts = ContextRounds(step, self.decode, self._sender)

    def launch(self, batch: ScheduledBatch) -> LaunchedRound:
        """Enqueues the round's work; after it the slots hold what the next round needs."""
        logprobs = LogprobRows()
        self.round_end.prepare(batch)
        self._grammar_masks.begin(batch)
        if batch.context_requests:
            sent = self.contexts.launch(batch, logprobs)
        else:
            sent = self._launch_windows(batch, logprobs)
        self.round_end.launched(batch)
        return LaunchedRound(
            batch,
            batch.last_chunk_requests,
            list(map(_num_drafts, batch.generation_requests)),
            sent.to_host,
            logprobs,
            perf_counter() if sent.to_host.is_here else None,
            sent.post_send,
        )

    def is_ragged(self, requests: list[LlmRequest], shape: DraftShape) -> bool:
        """Whether the host gives only one row to each request that takes no drafts, in a round with
        drafts of this shape. In a graph, and where drafts may be trees, it does not: all requests
        have whole windows, or the device chooses their rows."""
        if not shape.num_nodes or shape.is_ragged or all(map(_draft_limit, requests)):
            return False
        if self._slots.shapes.has_trees or self.round_end.reads_whole_windows:
            return False
        return self.graphs is None or not self.graphs.hold(len(requests), shape)

    def _launch_windows(self, batch: ScheduledBatch, logprobs: LogprobRows) -> SentResults:
        sampled = self.decode.run(batch, logprobs)
        if sampled.to_host is not None:  # the graph itself has sent them
            return SentResults(sampled.to_host)
        return SentResults(self._sender.send(sampled, logprobs))

    def discard_dummy_round(self) -> None:
        """Removes what the latest round left, which had the dummy slot only."""
        self._groups.forget()
        self._slots.reset_dummy()

    @property
    def graphs(self) -> WindowGraphs | None:
        """The graphs of rounds of generation windows."""
        return self.decode.graphs

    def capture_graphs(
        self,
        keys: list[GraphKey],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool,
        pool: GraphPool | None = None,
    ) -> None:
        """Captures the graphs that rounds of generation windows are run as where one of the keys
        fits."""
        graphs = self.decode.capture(keys, dummy_slot, device, pads=pads, pool=pool)
        self.round_end.capture_graphs(graphs.whole, keys)

    def capture_contexts(self, sizes: tuple[int, ...], dummy_slot: int, pool: GraphPool) -> None:
        """Captures the graphs that a few short context chunks are run as, where attention can be
        captured."""
        self.contexts.graphs = capture_contexts(self.engine, sizes, dummy_slot, pool)

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """How long the device takes for a round of dummy requests with empty contexts: the mean of
        a long row of replays; without a graph the best of a few eager rounds. No round may be in
        flight."""
        if self.graphs is not None and key in self.graphs:
            return self.graphs.seconds(key)
        slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)
        max_kv_len = min(TIMED_KV_LEN, self._step.max_len)
        run = partial(self._step.whole, slot_ids, key.shape, key.sampled, max_kv_len)
        return eager_seconds(lambda: run().new_lens)

    def seconds_with_contexts(self, key: GraphKey, limits: ContextLimits) -> float | None:
        """The same for a round in which every request has a long context; None where there is no
        graph, or no room for such contexts."""
        graphs, contexts = self.graphs, DummyContexts(self._slots, self.engine.attention, limits)
        if graphs is None or key not in graphs or not contexts.length(key.batch_size):
            return None
        with contexts.filled(key.batch_size) as renew:
            return graphs.seconds(key, list(range(key.batch_size)), renew)
