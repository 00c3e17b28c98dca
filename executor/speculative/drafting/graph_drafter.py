"""Drafting in CUDA graphs of its own, so that a round is two launches: the drafts, and the round of
the target that verifies drafts."""

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial

import torch

from tllm_spec.draft_shape import DraftShape
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.eager_timing import TIMED_KV_LEN, eager_seconds
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class GraphDrafter(Drafter):
    """A drafter whose work in a steady round is a function of the slots. It runs eagerly where no
    graph fits."""

    graphs: SlotGraphs[None] | None = None

    @abstractmethod
    def draft_from_slots(self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> None:
        """Writes drafts into the windows of the slots `[B]`, some of which may be the
        dummy slot."""

    @abstractmethod
    def draft_for_dummies(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> torch.Tensor:
        """The same without graphs, for timing: slot_ids `[B]` are all the dummy slot. Returns a
        tensor to wait for."""

    @abstractmethod
    def keys(self, of_rounds: list[GraphKey], asked: Iterable[GraphKey]) -> list[GraphKey]:
        """Which graphs to capture. of_rounds: the target's; asked: those of lengths that the
        controller may ask for."""

    def run_round_before(self, key: GraphKey) -> None:
        """A round of dummy requests, for a drafter that reads what such a round leaves."""

    def capture_drafting(self, rounds: CudaGraphs, keys: list[GraphKey]) -> None:
        """From now on drafting that fits one of the keys is one graph launch. `rounds`: the
        target's graphs."""
        graphs = rounds.for_same_slots(self.draft_from_slots)
        graphs.capture(keys, self.run_round_before)
        self.graphs = graphs

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """The device's time of drafting for dummy requests. 0 where there are graphs, but none for
        the key: then there is nothing to draft."""
        if self.graphs is None:
            slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)
            draft = partial(self.draft_for_dummies, slot_ids, key.shape, key.sampled, TIMED_KV_LEN)
            return eager_seconds(draft)
        if key not in self.graphs:
            return 0.0
        self.run_round_before(key)
        return self.graphs.seconds(key)
