"""A target whose choices are known: replays recorded texts, so that drafts are verified against
them whatever the logits are."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.row_positions import RowPositions
from tllm_spec.executor.sampling.sampler import Sampler


class ReplayedSampler(Sampler):
    """The choice at a position is the token that the text has there. texts: prompt and output by
    request id, of at most `max_len` tokens. After its end a text has zeros: a request ends there,
    so what its last window holds beyond does not count."""

    def __init__(
        self, texts: Mapping[int, Sequence[int]], max_len: int, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        shape = len(self.slots.window), max_len
        self._by_id = texts
        self._texts = torch.zeros(shape, dtype=torch.int64, device=self.slots.device)

    def start(self, request: LlmRequest) -> None:
        super().start(request)
        text = self._by_id[request.request_id]
        row = self._texts[request.slot]
        row[: len(text)] = to_device(array("q", text), row.device)
        row[len(text) :] = 0

    def _choose(self, group: RowGroup, logits: torch.Tensor, at: RowPositions) -> torch.Tensor:
        slots, positions = group.rows.expand(group.slots), at.positions(group.rows)
        return self._texts[slots, positions.clamp_max(self._texts.shape[1] - 1)]
