"""The CUDA graphs of rounds of generation windows: of whole rounds, or of forwards and tails."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs


@dataclass(frozen=True)
class WindowGraphs:
    """`forwards` are the same for every way of sampling. `whole` is empty where no round is one
    graph, `tails` where none has two."""

    whole: CudaGraphs
    forwards: SlotGraphs[torch.Tensor]
    tails: CudaGraphs

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.whole or key in self.tails

    def hold(self, num_requests: int, shape: DraftShape) -> bool:
        """Whether there are graphs for a round of so many requests with drafts of this shape."""
        return GraphKey(self.forwards.padded(num_requests), shape, False) in self.forwards

    def seconds(
        self, key: GraphKey, slots: list[int] | None = None, renew: Callable[[], None] | None = None
    ) -> float:
        """As `SlotGraphs.seconds`, for a round."""
        if key in self.whole:
            return self.whole.seconds(key, slots, renew)
        forward = self.forwards.ready(replace(key, sampled=False), slots)

        def before() -> None:
            if renew is not None:
                renew()
            forward()

        return self.tails.seconds(key, slots, before)
