"""The interface of everything that makes draft tokens: what it sees of a round, what it returns,
and when it runs.

A drafter of your own subclasses `Drafter`, overrides `prepare_draft_tokens`, and is given to
`UserProvidedDecodingConfig`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.kernels.slots.accept import Drafts
from tllm_spec.kernels.slots.round_rows import RoundRows


class When(Enum):
    """When a drafter runs. The last two draft for the next round, from what this one has emitted,
    so their drafts are in the slots when it begins."""

    HOST = "on the host, before the forward; it reads the tokens of the round before"
    DEVICE = "on the device, before the forward"
    GRAPH = "on the device, after acceptance, in the graph of the round"
    TAIL = "on the device, after acceptance, in launches of its own"


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


class Drafter:
    """Proposes tokens; it cannot change the text, only how fast it comes. This one proposes none:
    plain decoding.

    Before a round's forward `prepare_draft_tokens` is called, after its sampling `propose`, and
    after all of its launches `launched`."""

    when: When = When.HOST
    limits: Mapping[str, object] = MappingProxyType({})  # as given to the constructor
    # The class that the configured `resource_manager` must have; None: the drafter needs none.
    needed_manager: ClassVar[type[ResourceManager] | None] = None
    # Whether drafts in the slots may be replaced by text that a grammar forces, once the tokens of
    # the round before are read.
    knows_forced_text: bool = False
    # Whether it reads as many rows of every request.
    reads_whole_windows: bool = False

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: Mapping[int, int] | None = None,
    ) -> None:
        """A subclass need not call it. The arguments are TensorRT-LLM's: what is given must be what
        `UserProvidedDecodingConfig` says, which decides."""
        self.limits = {
            "max_draft_len": max_draft_len,
            "max_total_draft_tokens": max_total_draft_tokens,
            "max_concurrency": max_concurrency,
            "draft_len_schedule": draft_len_schedule,
        }

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafts of a round were made in the round before."""
        return self.when in (When.GRAPH, When.TAIL)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        """A drafter of yours sets `py_draft_tokens` of every request in
        `scheduled_requests.generation_requests`.

        On entry the list holds placeholders; replace it by 0 to `request.num_drafts_wanted` token
        ids that may follow `request.tokens` (prompt and output so far; read it, do not change it).
        More than are wanted, up to `max_draft_len`, are cut off. An exception, more tokens than
        that or an id outside the vocabulary fails that request with a message, and no other.

        With more `max_total_draft_tokens` than `max_draft_len` the drafts may be a tree: a list of
        paths, `[[5, 6], [5, 8], [9]]`, or a list of tokens, parents before children, with
        `request.py_draft_parents`: for each the number of the token before it, counted from 1, and
        0 for the last token of `request.tokens`. `num_drafts_wanted` is then the longest path.
        The children of a node must differ; equal beginnings of paths become one.

        `resource_manager` is the one that was configured with the drafter."""

    def propose(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> Drafts | None:
        """What a drafter on the device sees of a round, and its drafts for the next one.

        The slots have advanced by what was emitted. Drafts have this shape, for the requests of
        `group`, one row each, ended contexts before windows; None: there are none. It is called
        with NO_DRAFTS, too. Without contexts it is a function of device tensors, so that a CUDA
        graph can hold it.

        A drafter with `When.DEVICE` returns None. Its group has ended contexts without windows, or
        windows with all their rows. One with `When.HOST` is not asked."""
        return None

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

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: the requests that caused it; None if it was not raised here."""
        return None

    def state(self) -> Mapping[str, Any]:
        """Figures for `PyExecutor.state`. It may wait for the device."""
        return {}
