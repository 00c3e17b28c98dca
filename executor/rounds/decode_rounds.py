"""Rounds of generation windows: replayed as a CUDA graph where one fits, eager otherwise.

With a grammar a round is two graphs, the forward and its tail; between their launches the host
sends the masks. Where a request's rules need more than a round's graph knows, the forward at least
is a graph."""

from dataclasses import replace
from operator import attrgetter

import torch

from tllm_spec.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.graph_pool import GraphPool
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.rounds.decode_step import DecodeStep
from tllm_spec.executor.sampling.logprobs import LogprobRows

_graph_samples, _slot = attrgetter("graph_samples"), attrgetter("slot")


class DecodeRounds:
    """Runs batches of generation windows. Nothing is captured before `capture`."""

    graphs: CudaGraphs | None = None
    forward_graphs: SlotGraphs[torch.Tensor] | None = None
    tails: CudaGraphs | None = None

    def __init__(self, step: DecodeStep) -> None:
        self._step, self._masks = step, step.sampler.grammar_masks
        self._hidden = torch.empty(0)  # [T, H], where every forward graph leaves its result

    def run(self, batch: ScheduledBatch, logprobs: LogprobRows) -> SampledTokens:
        sampled = self._replay(batch)
        if sampled is None:
            hidden = self._replay_forward(batch)
            sampled = None if hidden is None else self._replay_tail(batch)
            if sampled is None:
                sampled = self._step.run(batch, logprobs, hidden)
        return sampled

    def capture(
        self,
        keys: list[GraphKey],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool,
        pool: GraphPool | None,
    ) -> CudaGraphs:
        """Raises ValueError when the memory does not suffice."""
        graphs = CudaGraphs(self._round, dummy_slot, device, pads=pads, pool=pool)
        graphs.capture(keys)
        model, num_rows = self._step.engine.model, max((key.num_tokens for key in keys), default=0)
        size = num_rows, model.config.hidden_size
        self._hidden = torch.empty(size, dtype=model.dtype, device=device)
        forwards = graphs.for_same_slots(self._forward)
        forwards.capture({replace(key, sampled=False) for key in keys})
        if self._masks.is_served:
            self._masks.make_room(num_rows)
            tails = graphs.for_same_results(self._tail)
            # A forward begins with the dummy slot empty, but no tail does.
            tails.capture(keys, lambda key: self._step.sampler.slots.reset_dummy())
            self._step.sampler.slots.reset_dummy()
            self.tails = tails
        self.graphs, self.forward_graphs = graphs, forwards
        return graphs

    def _round(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> SampledTokens:
        return self._step.from_slots(slot_ids, shape, is_sampled, self._step.max_len)

    def _forward(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> torch.Tensor:
        hidden = self._step.forward_from_slots(slot_ids, shape)
        return self._hidden[: len(hidden)].copy_(hidden)

    def _tail(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> SampledTokens:
        hidden = self._hidden[: len(slot_ids) * shape.window]
        return self._step.after_forward(slot_ids, hidden, shape, is_sampled)

    def _replay(self, batch: ScheduledBatch) -> SampledTokens | None:
        """None where no graph fits the batch, or a request's rules."""
        requests = batch.generation_requests
        needed = set(map(_graph_samples, requests))
        if self.graphs is None or None in needed or self._masks.has_windows:
            return None
        slots, is_sampled = list(map(_slot, requests)), True in needed
        sampled = self.graphs.replay(slots, batch.shape, is_sampled)
        if sampled is not None:
            self._step.round_end.after_replay(slots, batch.shape, is_sampled)
        return sampled

    def _replay_forward(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Hidden states of the windows, `[B * W, H]`, which the next replay of any graph
        overwrites; None where no graph fits."""
        if self.forward_graphs is None:
            return None
        slots = list(map(_slot, batch.generation_requests))
        captured = self.forward_graphs.run(slots, batch.shape, False)
        return None if captured is None else captured.result[: len(slots) * batch.shape.window]

    def _replay_tail(self, batch: ScheduledBatch) -> SampledTokens | None:
        """After a replayed forward. None where a request's rules need more than grammars."""
        requests, window = batch.generation_requests, batch.shape.window
        needed = set(map(_graph_samples, requests))
        if self.tails is None or None in needed or not self._masks.has_windows:
            return None
        slots = list(map(_slot, requests))
        self._masks.send(requests, window, self.tails.padded(len(slots)) * window)
        return self.tails.replay(slots, batch.shape, True in needed)
