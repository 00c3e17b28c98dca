"""Drafting before the target's forward as CUDA graphs of its own, so that a round is two launches:
the drafts, then the round that verifies them.

It knows graphs and keys; what is captured is the drafter's.
"""

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch

from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.eager_timing import TIMED_KV_LEN, eager_seconds
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class GraphDrafter(Drafter):
    """A drafter whose work of a steady round is a function of the slots. It runs eagerly where no
    graph fits."""

    graphs: SlotGraphs[None] | None = None

    @abstractmethod
    def draft_from_slots(self, slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        """Writes `draft_len` drafts into the windows of the slots `[B]`, some of which may be the
        dummy."""

    @abstractmethod
    def draft_for_dummies(
        self, slot_ids: torch.Tensor, draft_len: int, sampled: bool, max_kv_len: int
    ) -> torch.Tensor:
        """The same without a graph of the round before, for the dummy slot B times. Something to
        wait for."""

    @abstractmethod
    def keys(self, of_rounds: list[GraphKey], asked: Iterable[GraphKey]) -> list[GraphKey]:
        """Which graphs are worth having. of_rounds: the target's; asked: those of lengths that it
        may be asked for."""

    def run_round_before(self, key: GraphKey) -> None:
        """A round of dummies, for whoever drafts from what a round has left."""

    def capture_graphs(self, target: CudaGraphs, keys: list[GraphKey]) -> None:
        """From now on drafting that fits one of the keys is one graph launch. `target`: with graphs
        of its rounds."""
        graphs = target.beside(self.draft_from_slots)
        graphs.capture(keys, self.run_round_before)
        self.graphs = graphs

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """How long drafting takes for nothing but dummies. 0 where there are graphs, and none of
        it: nothing to draft, then."""
        if self.graphs is None:
            slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)
            draft = partial(
                self.draft_for_dummies, slot_ids, key.draft_len, key.sampled, TIMED_KV_LEN
            )
            return eager_seconds(draft)
        if key not in self.graphs:
            return 0.0
        self.run_round_before(key)
        return self.graphs.seconds(key)
