"""The interface of what makes drafts inside a round: a draft network, or a match in the request's
own text."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.round_end import ContextResult, WindowResult
from tllm_spec.kernels.slots.accept import Drafts


class Proposer:
    """Makes the drafts of the next round from what the target has read and emitted in this one. The
    slots have advanced by what was emitted. This one proposes nothing.

    `reads_whole_windows`: see `RoundEnd`."""

    reads_whole_windows = False

    def propose(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> Drafts | None:
        """Drafts of this shape for the requests of `group`, one row each, ended contexts before
        windows; None: there are none. It is called with NO_DRAFTS, too, to see what was emitted.
        Without contexts it is a function of device tensors, so that a CUDA graph can hold it."""
        return None

    def prepare(self, batch: ScheduledBatch) -> None:
        """As `RoundEnd.prepare`."""

    def launched(self, batch: ScheduledBatch) -> None:
        """As `RoundEnd.launched`."""

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        """As `RoundEnd.capture_graphs`."""

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        """As `RoundEnd.draft_probs`."""
        return None

    def state(self) -> Mapping[str, Any]:
        """As `RoundEnd.state`."""
        return {}
