"""How a drafter on the device takes part in the target's rounds: after context chunks, and in the
tail of a round of windows.

`RoundEnd` itself drafts nothing: it serves plain decoding and drafters on the host."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass(frozen=True)
class ContextResult:
    """The context chunks that the target has read, one per request.

    `following`: the prompt token after each chunk; None after the last chunk of a context, whose
    next token is in `first_tokens` `[C]`, one per ended context (None: no context ended)."""

    requests: list[LlmRequest]
    chunks: list[ContextChunk]
    following: list[int | None]
    first_tokens: torch.Tensor | None


@dataclass(frozen=True)
class WindowResult:
    """The windows that the target has verified, with drafts of this shape, and the tokens that it
    emitted for them. `read_rows` `[B * W]`: the rows of the target's forward that stand for those
    of whole windows; None: the forward had the windows' own rows."""

    windows: Windows
    sampled: SampledTokens
    shape: DraftShape
    read_rows: torch.Tensor | None = None

    def read(self, lookahead: int) -> Windows:
        """What the target emitted, as windows of a draft network with this `lookahead`."""
        target, shape = self.windows, self.shape
        return Windows(
            target.slots,
            target.first if lookahead else target.first + 1,
            self.sampled.new_tokens.clamp_min(0),
            target.max_kv_len - (shape.window - shape.path) + 1 - lookahead,
            part=self.read_part,
        )

    @property
    def read_part(self) -> RoundRows | None:
        """The rows of `read`; None: all of its windows."""
        return self.windows.part if self.sampled.rows is None else None

    def captured_rows(self, num_before: int) -> torch.Tensor | None:
        """Rows of the target's forward whose hidden states `read` takes, after `num_before` rows of
        chunks, which it takes, too: `[num_before + B * (D+1)]`. None: all rows, in order."""
        rows, own, part = self.sampled.rows, self.read_rows, self.windows.part
        if own is not None:
            if rows is not None:
                own = own.view(len(rows), -1).gather(1, rows).flatten()
            own = own + num_before
        elif rows is not None:
            if part is None or part.offsets is None:
                firsts = torch.arange(len(rows), device=rows.device) * self.shape.window
            else:
                firsts = part.offsets[:-1]
            own = (rows + (firsts + num_before).unsqueeze(1)).flatten()
        else:
            return None
        return torch.cat((torch.arange(num_before, device=own.device), own)) if num_before else own


class RoundEnd:
    """The null object: it does nothing. After the sampling the slots have advanced by what the
    round emitted.

    `splits_rounds`: drafts are made in launches of their own, so that the forward of a round and
    its tail are never one graph. `reads_whole_windows`: drafting reads as many rows of every
    request."""

    splits_rounds = False
    reads_whole_windows = False

    def prepare(self, batch: ScheduledBatch) -> None:
        """Called before the target's forward is launched."""

    def after_contexts(
        self, batch: ScheduledBatch, contexts: ContextResult, windows: WindowResult | None
    ) -> None:
        """Called after the sampling of a forward with context chunks. windows: those of the same
        forward."""

    def tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        """After the sampling of a round of windows: makes drafts of this shape for the group. A
        function of device tensors, so that a CUDA graph can hold it."""

    def launched(self, batch: ScheduledBatch) -> None:
        """Called after everything of the round was launched."""

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        """Called when graphs were captured for rounds of these keys; `rounds` are some of them."""

    def seconds_before(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        """How long the device takes before the target's forward, for dummy requests."""
        return 0.0

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        """What the drafts in the group's windows were drawn from, `[B, K, V]` over the target's
        vocabulary, for rejection sampling; None where it is not kept."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Figures for `PyExecutor.state`. It may wait for the device."""
        return {}
