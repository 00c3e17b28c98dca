"""Rounds of generation windows, which have two forms: one CUDA graph for the whole round, or the
forward and then the tail, each a graph or eager.

A round is split where its drafts are made in launches of their own, where the host sends masks of
grammars between the two, where a request's rules need more than a graph knows (then the tail is
eager), and where no graph fits (then both are)."""

from dataclasses import replace
from operator import attrgetter

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, GraphPool, WindowGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.decode_step import DecodeStep
from tllm_spec.executor.sampling.logprobs import LogprobRows

_graph_samples, _slot = attrgetter("graph_samples"), attrgetter("slot")


class DecodeRounds:
    """Runs batches of generation windows. graphs: None before `capture`."""

    def __init__(self, step: DecodeStep) -> None:
        self._step, self._masks = step, step.sampler.grammar_masks
        self.graphs: WindowGraphs | None = None
        self._hidden = torch.empty(0)  # [T, H], where every forward graph leaves its result

    def run(self, batch: ScheduledBatch, logprobs: LogprobRows) -> SampledTokens:
        requests, shape, graphs = batch.generation_requests, batch.shape, self.graphs
        if graphs is None or batch.row_counts is not None:
            return self._step.run(batch, logprobs)
        slots, is_sampled = list(map(_slot, requests)), _way_of_sampling(requests)
        if is_sampled is not None and not self._masks.has_windows:
            sampled = graphs.whole.replay(slots, shape, is_sampled)
            if sampled is not None:
                return sampled
        forward = graphs.forwards.run(slots, shape, False)
        if forward is None:
            return self._step.run(batch, logprobs)
        num_padded = graphs.tails.padded(len(slots))
        if is_sampled is not None and num_padded:
            self._masks.send(requests, shape.window, num_padded * shape.window)
            sampled = graphs.tails.replay(slots, shape, is_sampled)
            assert sampled is not None, "each forward has its tails"
            return sampled
        hidden = forward.result if shape.is_ragged else forward.result[: batch.num_window_rows]
        return self._step.run(batch, logprobs, hidden)

    def capture(
        self,
        keys: list[GraphKey],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool,
        pool: GraphPool | None,
    ) -> WindowGraphs:
        """Raises ValueError when the memory does not suffice."""
        step, splits_rounds = self._step, self._step.round_end.splits_rounds
        whole = CudaGraphs(self._whole, dummy_slot, device, pads=pads, pool=pool)
        whole.capture([] if splits_rounds else keys)
        model, num_rows = step.engine.model, max((key.num_tokens for key in keys), default=0)
        size = num_rows, model.config.hidden_size
        self._hidden = torch.empty(size, dtype=model.dtype, device=device)
        forwards = whole.for_same_slots(self._forward)
        forwards.capture({replace(key, sampled=False) for key in keys})
        if self._masks.is_served:
            self._masks.make_room(max(key.batch_size * key.shape.window for key in keys))
        tails = whole.for_same_results(self._tail)
        # A forward begins with the dummy slot empty, but no tail does.
        tails.capture(
            keys if splits_rounds or self._masks.is_served else [],
            lambda key: step.before_tail(key.batch_size, key.shape),
        )
        step.sampler.slots.reset_dummy()
        self.graphs = WindowGraphs(whole, forwards, tails)
        return self.graphs

    def _whole(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> SampledTokens:
        return self._step.whole(slot_ids, shape, is_sampled, self._step.max_len)

    def _forward(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> torch.Tensor:
        hidden = self._step.forward(slot_ids, shape)
        return self._hidden[: len(hidden)].copy_(hidden)

    def _tail(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> SampledTokens:
        hidden = self._hidden[: shape.num_rows(len(slot_ids))]
        return self._step.tail(slot_ids, hidden, shape, is_sampled)


def _way_of_sampling(requests: list[LlmRequest]) -> bool | None:
    """As `GraphKey.sampled`; None where a request's rules need more than a graph knows."""
    needed = set(map(_graph_samples, requests))
    return None if None in needed else True in needed
