"""How long the device takes for rounds of dummy requests, which a controller of the draft length
compares."""

from functools import partial

import torch

from tllm_spec.executor.graphs.dummy_contexts import ContextLimits, DummyContexts
from tllm_spec.executor.graphs.eager_timing import TIMED_KV_LEN, eager_seconds
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.rounds.decode_rounds import DecodeRounds
from tllm_spec.executor.rounds.decode_step import DecodeStep


class RoundTiming:
    """Times rounds of dummy requests. No round may be in flight."""

    def __init__(self, step: DecodeStep, decode: DecodeRounds) -> None:
        self._step, self._decode = step, decode

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """Of a round with empty contexts: the mean of a long row of replays; without a graph the
        best of a few eager rounds."""
        graphs = self._decode.graphs
        if graphs is not None and key in graphs:
            return graphs.seconds(key)
        slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)
        max_kv_len = min(TIMED_KV_LEN, self._step.max_len)
        run = partial(self._step.whole, slot_ids, key.shape, key.sampled, max_kv_len)
        return eager_seconds(lambda: run().new_lens)

    def seconds_with_contexts(self, key: GraphKey, limits: ContextLimits) -> float | None:
        """Of a round in which every request has a long context; None where there is no graph, or
        no room for such contexts."""
        graphs, engine = self._decode.graphs, self._step.engine
        contexts = DummyContexts(self._step.sampler.slots, engine.attention, limits)
        if graphs is None or key not in graphs or not contexts.length(key.batch_size):
            return None
        with contexts.filled(key.batch_size) as renew:
            return graphs.seconds(key, list(range(key.batch_size)), renew)
