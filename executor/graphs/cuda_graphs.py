"""Generation rounds as CUDA graphs: a round is one launch, and the draft length can change from
round to round. The last kernel of a graph sends the results to the host."""

from collections.abc import Callable, Iterable

import torch

from tllm_spec.config.draft_shape import MAX_BUDGETS, DraftShape
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.device.result_ring import ResultRing
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs

Work = Callable[[torch.Tensor, DraftShape, bool], SampledTokens]


class CudaGraphs(SlotGraphs[SampledTokens]):
    """Rounds of generation windows as CUDA graphs. Each graph is one round of its slots."""

    _ring: ResultRing | None = None

    def for_same_results(self, work: Work) -> "CudaGraphs":
        """Graphs of another part of the round, with the same results ring; to be captured next."""
        graphs = CudaGraphs(work, self._dummy_slot, self._device, pads=self._pads, pool=self._pool)
        graphs._ring = self._ring
        return graphs

    def capture(
        self, keys: Iterable[GraphKey], before: Callable[[GraphKey], None] | None = None
    ) -> None:
        wanted = list(keys)
        if self._ring is None:
            self._ring = self._make_ring(wanted)
        super().capture(wanted, before)
        self._count_results()

    def replay(self, slots: list[int], shape: DraftShape, sampled: bool) -> SampledTokens | None:
        """The round of these slots, or None when no graph fits. The next replay of these graphs
        overwrites the result."""
        captured = self.run(slots, shape, sampled)
        if captured is None:
            return None
        result, number = captured.result, len(slots)
        tokens, lens = result.new_tokens, result.new_lens
        if number < len(lens):
            tokens, lens = tokens[:number], lens[:number]
        to_host = None if self._ring is None else self._ring.sent(number, result.num_columns)
        ranks, num_drafts = (
            None if each is None else each[:number] for each in (result.ranks, result.num_drafts)
        )
        return SampledTokens(tokens, lens, ranks=ranks, num_drafts=num_drafts, to_host=to_host)

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        try:
            return super().seconds(key, slots, renew)
        finally:
            self._count_results()

    def _run_work(self, key: GraphKey) -> SampledTokens:
        result = super()._run_work(key)
        if self._ring is not None:
            self._ring.send(result.new_lens, result.columns())
        return result

    def _make_ring(self, keys: list[GraphKey]) -> ResultRing | None:
        if not keys or not ResultRing.serves(self._device):
            return None
        # Tokens, and with trees of several shapes as many ranks, or what budgets would bring.
        number = max(key.batch_size for key in keys)
        path = max(key.shape.path for key in keys)
        capacity = number * (2 + path + max(path, MAX_BUDGETS))
        return ResultRing(capacity, self._device)

    def _count_results(self) -> None:
        """Called after replays whose results are not read."""
        if self._ring is not None:
            self._ring.count_again()
