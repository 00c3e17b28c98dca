"""The interface of everything that makes draft tokens: what it sees of a round, what it returns,
and when it runs.

A drafter of your own subclasses `Drafter`, overrides `prepare_draft_tokens`, and is given to
`UserProvidedDecodingConfig`."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost, to_device
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.grammar.thinking_budget import TextRules
from tllm_spec.kernels.slots.accept import Drafts


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
            part=target.part if self.sampled.rows is None else None,
        )

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


class RoundResult(NamedTuple):
    """What the target has read in one forward; None: no contexts, or no windows."""

    contexts: ContextResult | None
    windows: WindowResult | None

    @property
    def num_chunk_rows(self) -> int:
        """Rows of the forward before those of the windows."""
        return sum(len(chunk.tokens) for chunk in self.contexts.chunks) if self.contexts else 0


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
    resources: Sequence[ResourceManager] = ()  # what it keeps for each request
    # Why none of its drafts may ever be accepted.
    causes: str = (
        "the draft weights were made for another model or another version of it, their settings "
        "(eagle3_layers_to_capture, the vocabulary) are not those of their training, or they are "
        "random (load_format dummy)"
    )

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

    def propose(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> Drafts | None:
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

    def seconds_before(self, key: GraphKey) -> float:
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


# Drafts that the host sends to the slots, or knows to be there: those of the round before, and
# better ones where a grammar forces text.


_num_ready, _slot = attrgetter("num_drafts_ready"), attrgetter("slot")
Own = TypeVar("Own")


def improve(
    requests: Sequence[LlmRequest],
    drafts: list[Own],
    limits: Sequence[int],
    better: Callable[[TextRules, Own, int], Own],
) -> None:
    """Replaces drafts of requests with grammars, which may know better ones, in place. limits: of
    each request's drafts."""
    for number, request in enumerate(requests):
        if request.grammar is not None and limits[number]:
            request.grammar.read(request.tokens, request.prompt_len)
            drafts[number] = better(request.grammar, drafts[number], limits[number])


def send_chains(
    slots: SlotState, requests: Sequence[LlmRequest], drafts: Sequence[list[int]], draft_len: int
) -> None:
    """Sends chains to the requests' next windows. Those that are shorter than `draft_len` are
    padded with the request's own last token: the forward reads it, and another token's embedding
    might be NaN."""
    rows: list[int] = []  # of slot, number of drafts, padded drafts
    for request, draft in zip(requests, drafts, strict=True):
        rows += (request.slot, len(draft))
        rows += draft
        rows += request.tokens[-1:] * (draft_len - len(draft))
    table = to_device(array("q", rows), slots.device).view(len(requests), -1)
    slot_ids, numbers = table[:, :2].t().contiguous()
    slots.write(slot_ids, Drafts(table[:, 2:].contiguous(), numbers))


def take_ready(
    batch: ScheduledBatch, slots: SlotState, *, knows_forced_text: bool, narrows: bool
) -> None:
    """Counts the drafts that the round before has left in the slots. The host knows how many a
    request may have, and reads no more, but for requests with grammars whose tokens it has read.
    knows_forced_text: False: their drafts stay as they are. narrows: windows become as long as the
    longest drafts, for which the device is waited for."""
    draft_len = batch.shape.depth
    longest = max(map(_num_ready, batch.generation_requests), default=0)
    batch.made_draft_len = batch.asked_draft_len = min(draft_len, longest)
    for request in batch.generation_requests:
        ready, limit = request.num_drafts_ready, request.draft_limit
        # `min` of three numbers would take longer than the rest of the loop, and most requests
        # have all drafts.
        request.py_num_draft_tokens = (
            draft_len if ready >= draft_len <= limit else min(ready, limit)
        )
    if knows_forced_text and draft_len:
        _improve_ready(batch, slots)
    if narrows and batch.made_draft_len and not batch.shape.is_ragged:
        _narrow(batch, slots)


def _improve_ready(batch: ScheduledBatch, slots: SlotState) -> None:
    """A tree is dropped where the grammar forces as many tokens as it is deep, or a token that it
    does not have."""
    guided = [
        request
        for request in batch.generation_requests
        if request.grammar is not None
        and not request.tokens_in_flight
        and request.num_drafts_wanted
    ]
    if not guided:
        return
    slot_ids = _slot_ids(guided, slots)
    windows = slots.window[:, 1 : batch.shape.window].index_select(0, slot_ids)
    sent = ToHost([windows, slots.num_real(slot_ids, batch.shape)])
    limits = [request.num_drafts_wanted for request in guided]
    tokens, numbers = (each.tolist() for each in sent.wait())
    numbers = list(map(min, numbers, limits))
    is_tree = batch.shape.is_tree
    drafts: list[list[int]] = [
        [] if is_tree else row[:number] for row, number in zip(tokens, numbers, strict=True)
    ]
    improve(guided, drafts, limits, lambda rules, *chain: rules.better_drafts(*chain))
    better = [
        (request, draft)
        for request, draft, number, row in zip(guided, drafts, numbers, tokens, strict=True)
        if not is_tree or len(draft) >= max(number, 1) or not set(draft[:1]) <= set(row)
    ]
    for request, draft in better:
        request.py_num_draft_tokens = len(draft)
        batch.made_draft_len = max(batch.made_draft_len, len(draft))
    if better:
        requests, chains = zip(*better, strict=True)
        send_chains(slots, requests, chains, batch.shape.depth)


def _narrow(batch: ScheduledBatch, slots: SlotState) -> None:
    slot_ids = _slot_ids(batch.generation_requests, slots)
    batch.made_draft_len = int(slots.num_real(slot_ids, batch.shape).max())
    narrow = slots.shapes.of(batch.made_draft_len)
    if narrow.num_nodes <= batch.shape.num_nodes:  # there are pages for no more
        batch.shape = narrow


def _slot_ids(requests: Sequence[LlmRequest], slots: SlotState) -> torch.Tensor:
    return to_device(list(map(_slot, requests)), slots.device)
