"""Drafts with a network on the target's KV pages: after acceptance it reads the accepted tokens and
drafts the next window. What rounds without drafts leave unread is kept, and read later.

The network's layers are extra layers of the target's pages: they share block table and page
numbers, so pages, rewinds and prefix reuse need no bookkeeping of their own. Draft rows of rejected
tokens are overwritten by the next round."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.drafter import (
    ContextResult,
    Drafter,
    RoundResult,
    When,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.drafting_steps import (
    DraftSteps,
    fill_in,
    read_masks,
    with_masks,
)
from tllm_spec.executor.speculative.drafting.suffix_match import DraftChoice, copied
from tllm_spec.kernels.slots.accept import Drafts
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import Rings, gather_rows, store_in_rings

# Positions that rounds without drafts leave unread by the draft layers on the target's pages.
#
# A round of draft length 0 adds one position to every request. To read it at once would stream the
# draft's weights for one token. Instead it is kept, and one forward reads up to `BACKLOG_LEN`
# positions of all requests. The host counts a request's positions (`LlmRequest.draft_backlog`):
# such a round adds exactly one, so the count is known before the round is read. The device keeps
# what they are read from in a ring per slot.
#
# A head reads hidden states, so it must read before its ring overflows. A draft model reads tokens
# only: it waits until drafts are wanted, and takes what the ring lacks from the host's tokens.


# Tokens that a draft network has not read and that the device no longer keeps for it.
#
# `LlmRequest.draft_backlog` counts what a request's draft network has not read. The last of these
# tokens are on the device: in a ring (`DraftBacklog`), or in the slot, for a draft model with
# pages of its own. Earlier ones are read from the host's tokens before drafting resumes, in
# forwards of at most `max_num_tokens` rows, as prompts are.


class Missed(NamedTuple):
    """The request's tokens from `start` up to and without `end`."""

    request: LlmRequest
    start: int
    end: int


def missed_by(request: LlmRequest, num_kept: int, num_read: int = 0) -> Missed:
    """What a generating request's draft network has not read, but for the last `num_kept` tokens.
    The backlog is a bound: the first `num_read` tokens were read in any case.

    The latest rounds have added one token each, so the host knows the end on the device, also with
    a round in flight."""
    end = request.num_tokens + (request.tokens_in_flight > 0)
    return Missed(request, max(num_read, end - request.draft_backlog), end - num_kept)


def read_missed(net: DraftNet, missed: Iterable[Missed], max_num_tokens: int) -> None:
    """The draft network reads these tokens."""
    for chunks in _forwards(missed, max_num_tokens):
        no_rows = torch.empty(0, dtype=torch.int64, device=net.rows.device)
        net.forward(chunks, None, None, wanted=no_rows)


def _forwards(missed: Iterable[Missed], max_num_tokens: int) -> list[list[ContextChunk]]:
    """The chunks of each forward, in order."""
    forwards: list[list[ContextChunk]] = []
    room = 0
    for request, start, end in missed:
        while start < end:
            if not room:
                forwards.append([])
                room = max_num_tokens
            stop = min(end, start + room)
            forwards[-1].append(ContextChunk(request.slot, start, request.tokens[start:stop]))
            room -= stop - start
            start = stop
    return forwards


# With 4 query heads per KV head, such a window fills one tile of Triton's attention kernel. A
# longer one would cost prefix hits: a finished request's unread positions are not reused.
BACKLOG_LEN = 16
_backlog_of, _adapter_of = attrgetter("draft_backlog"), attrgetter("adapter")


class DraftBacklog:
    """What a draft network has not read yet: a ring of `BACKLOG_LEN` positions per slot.
    `max_requests` are read in one forward. A request has at most `max_unread` unread positions:
    `inf` for a network that reads tokens only."""

    def __init__(self, net: DraftNet, slots: SlotState, max_num_tokens: int) -> None:
        self.max_unread = inf if net.spec is None else BACKLOG_LEN
        self.max_requests = max(1, max_num_tokens // BACKLOG_LEN)
        self._max_num_tokens = max_num_tokens
        self._net = net
        self._slots = slots
        self._graphs: SlotGraphs[None] | None = None
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        self._num_due = torch.zeros(len(slots.kv_lens), dtype=torch.int64, device=slots.device)
        size = len(slots.kv_lens) * BACKLOG_LEN
        captured = net.captured(1)
        self._rings = Rings(
            BACKLOG_LEN,  # of each position: the target's states, and the token after it
            tokens=torch.zeros(size, dtype=torch.int64, device=slots.device),
            states=None if captured is None else captured.new_zeros((size, captured.shape[1])),
        )

    @staticmethod
    def num_bytes(num_slots: int, captured: torch.Tensor | None) -> int:
        """Device memory of the rings. captured: the target's states of one token, `[1, n * H]`."""
        state_bytes = 0 if captured is None else captured.nbytes
        return num_slots * (
            BACKLOG_LEN * (state_bytes + torch.int64.itemsize) + torch.int64.itemsize
        )

    def store(self, windows: Windows, new_tokens: torch.Tensor, first_row: int) -> None:
        """Keeps what the target has just read in windows of one token, the forward's rows from
        `first_row` on, and the tokens after it, new_tokens `[B]`."""
        captured = self._net.captured(first_row + len(windows.slots))
        states = captured[first_row:] if captured is not None and first_row else captured
        store_in_rings(self._rings, windows.slots, windows.first, new_tokens, states)

    def read(self, requests: Sequence[LlmRequest]) -> None:
        """Lets the draft network read all unread positions of the requests."""
        late = [request for request in requests if request.draft_backlog > BACKLOG_LEN]
        # The rings have the last tokens, those of rounds in flight included.
        missed = [missed_by(request, BACKLOG_LEN) for request in late]
        read_missed(self._net, missed, self._max_num_tokens)
        for request in late:
            request.draft_backlog = BACKLOG_LEN
        for first in range(0, len(requests), self.max_requests):
            some = requests[first : first + self.max_requests]
            slots = [request.slot for request in some]
            numbers = [slots, [request.draft_backlog for request in some]]
            slot_ids, num_due = to_device(numbers, self._slots.device).unbind(0)
            self._num_due[slot_ids] = num_due
            adapted = self._net.adapters is not None and any(map(_adapter_of, some))
            self._use_adapters(adapted)
            if self._graphs is None or self._graphs.run(slots, NO_DRAFTS, False, adapted) is None:
                self._catch_up(slot_ids, max(request.num_tokens_bound for request in some))
            for request in some:
                request.draft_backlog = 0

    def capture_graphs(self, target: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        """Captures the graphs that reading is run as where one of the keys' batch sizes fits."""
        sizes = {key.batch_size for key in keys if key.batch_size <= self.max_requests}
        max_len = self._net.rows.max_len
        self._graphs = target.for_same_slots(lambda slots, *_: self._catch_up(slots, max_len))
        kinds = (False,) if self._net.adapters is None else (False, True)
        wanted = (GraphKey(size, NO_DRAFTS, False, kind) for size in sizes for kind in kinds)
        self._graphs.capture(wanted, lambda key: self._use_adapters(key.adapted))
        self._use_adapters(False)

    def _use_adapters(self, are_used: bool) -> None:
        """Before what is read. A round says it again for its own requests."""
        if self._net.adapters is not None:
            self._net.adapters.use(are_used)

    def _catch_up(self, slot_ids: torch.Tensor, max_kv_len: int) -> None:
        """Reads the unread positions of slots `[B]` for their K and V only. They are the last rows
        of windows that end where the slots end.

        A function of device tensors, so that a CUDA graph can capture it. max_kv_len: upper bound
        of the slots' lengths plus one."""
        net, rings = self._net, self._rings
        ends = self._slots.kv_lens.index_select(0, slot_ids)
        rows = torch.arange(-BACKLOG_LEN, 0, device=ends.device)
        entries = rings.indices(slot_ids.unsqueeze(1), ends.unsqueeze(1) + rows)
        state = None
        if rings.states is not None:
            state = net.fuse(gather_rows(rings.states, entries.flatten()))
        windows = Windows(
            slots=slot_ids,
            first=ends - (BACKLOG_LEN - 1 + net.lookahead),
            token_ids=rings.tokens[entries].clamp_min_(0),
            max_kv_len=max_kv_len,
            num_padding=BACKLOG_LEN - self._num_due.index_select(0, slot_ids),
        )
        self._net.forward([], windows, state, wanted=self._no_rows)


class NetworkDrafter(Drafter):
    """Drafts chains or trees with a network, in the graph of a round (one-model path) or in its
    tail (two-model path). What a round of draft length 0 leaves for the network to read goes to a
    backlog. choice: adds drafts of matches in the text; None: there are none."""

    def __init__(
        self,
        net: DraftNet,
        slots: SlotState,
        sampling: DraftSampling,
        max_num_tokens: int,
        when: When,
        choice: DraftChoice | None = None,
    ) -> None:
        self.net, self.reads_whole_windows = net, net.reads_whole_windows
        self.when = when
        if net.has_keys:
            self._backlog = DraftBacklog(net, slots, max_num_tokens)
        self._slots = slots
        self._choice = choice
        self._steps = DraftSteps(net, slots, sampling, choice)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        # Kept, because making them is a launch.
        num_rows = len(slots.kv_lens) * slots.shapes.longest.path
        self._rows_before = torch.arange(-1, num_rows - 1, device=slots.device)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        """Drafts are in the slots. The generating requests catch up if the batch drafts, or if one
        of them has as many unread positions as there may be."""
        batch = scheduled_requests
        longest = max(map(_backlog_of, batch.generation_requests), default=0)
        if longest > (0 if batch.new_shape != NO_DRAFTS else self._backlog.max_unread - 1):
            batch.catches_up = longest > BACKLOG_LEN
            self._backlog.read(batch.generation_requests)

    def launched(self, batch: ScheduledBatch) -> None:
        """Counts the positions that are left unread."""
        if batch.new_shape == NO_DRAFTS:
            for request in batch.generation_requests:
                request.draft_backlog += 1

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        self._backlog.capture_graphs(rounds, keys)

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        return self._steps.probs(group)

    def state(self) -> Mapping[str, Any]:
        return {} if self._choice is None else self._choice.state()

    def propose(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> Drafts | None:
        """Reads what the target has read, and drafts. With NO_DRAFTS it only reads, and windows of
        one token go to the backlog instead."""
        if self._choice is not None:
            self._choice.read(seen, group)
        windows = seen.windows
        if windows is not None and windows.shape == NO_DRAFTS and shape == NO_DRAFTS:
            first_token = windows.sampled.new_tokens[:, 0]
            self._backlog.store(windows.windows, first_token, seen.num_chunk_rows)
            if seen.contexts is None:
                return None
            seen = RoundResult(seen.contexts, None)
        is_drafting = shape != NO_DRAFTS and len(group.slots) > 0
        if not is_drafting or shape.is_copied:
            self._catch_up(seen, False)
            return copied(self._choice, group, shape) if is_drafting else None
        kv_lens = gather_rows(self._slots.kv_lens, group.slots)
        states, bound = self._states(seen, group.slots, kv_lens, shape.depth)
        return self._steps.draft(group, shape, kv_lens, states, bound)

    def _states(
        self, seen: RoundResult, slot_ids: torch.Tensor, kv_lens: torch.Tensor, num_drafts: int
    ) -> tuple[torch.Tensor, int]:
        """Reads what was emitted. Returns the states that `DraftSteps.draft` takes, and a bound of
        the KV lengths. All drafts at once come from one forward, which reads what was emitted, too.
        With contexts or parts of windows, and where mask rows fill in, they have a forward of their
        own."""
        net, (contexts, windows) = self.net, seen
        if net.masks is None:
            return self._catch_up(seen, True)
        if net.block is not None:
            _, bound = self._catch_up(seen, False)
            newest = gather_rows(self._slots.window[:, 0], slot_ids)
            return fill_in(net, slot_ids, kv_lens, newest, num_drafts, bound), bound
        if contexts is None and windows is not None and windows.windows.rows.offsets is None:
            return self._read_with_masks(windows, num_drafts), 0
        states, bound = self._catch_up(seen, True)
        if num_masks := num_drafts - 1:
            later = read_masks(net, slot_ids, kv_lens, num_masks, bound)
            states = torch.cat((states, later))
        return states, bound

    def _read_with_masks(self, windows: WindowResult, num_drafts: int) -> torch.Tensor:
        """Reads what windows have emitted, with mask rows after it. Returns the states that drafts
        come from, `[num_drafts * N, H]`."""
        net, read, state = self.net, windows.read(self.net.lookahead), None
        assert net.masks is not None
        if net.masks.state is not None:
            rows = windows.captured_rows(0)
            if rows is None:
                captured = net.captured(read.token_ids.numel())
                assert captured is not None
                state = net.fuse(captured)
            else:
                state = net.state_of(rows)
        new_lens = windows.sampled.new_lens
        read, state, wanted = with_masks(read, state, new_lens, num_drafts, net.masks)
        return self.net.forward([], read, state, wanted=wanted)

    def _catch_up(self, seen: RoundResult, is_drafting: bool) -> tuple[torch.Tensor, int]:
        """Reads what the target has just read, one token further. Returns the state of the rows
        that the first draft comes from, `[N, H]`, no rows unless `is_drafting`; and a bound of the
        KV lengths in the steps after it."""
        chunks, patched, last_rows = self._chunks(seen.contexts)
        windows, read, state = seen.windows, None, None
        bound = max((chunk.end for chunk in chunks), default=0)
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        if windows is not None:
            read = windows.read(self.net.lookahead)
            bound = max(bound, read.max_kv_len)
            captured = windows.captured_rows(num_rows)
            state = None if captured is None else self.net.state_of(captured)
        wanted = self._no_rows
        if is_drafting:
            part = None if read is None else read.part
            wanted = self._drafted_from(last_rows, windows, part, num_rows)
        return self.net.forward(chunks, read, state, patched, wanted), bound

    def _drafted_from(
        self,
        last_rows: list[int],
        windows: WindowResult | None,
        part: RoundRows | None,
        num_rows: int,
    ) -> torch.Tensor:
        """The rows that drafts begin at, `[N]`: the last rows of ended contexts, and for each
        window the row of its last new token; windows, of which these parts are read, come after
        the `num_rows` rows of chunks."""
        ended = to_device(last_rows, self._slots.device) if last_rows else self._no_rows
        if windows is None:
            return ended
        batch, width = windows.sampled.new_tokens.shape
        if part is None or part.offsets is None:
            rows = self._rows_before[: batch * width : width] + windows.sampled.new_lens
        else:
            rows = part.offsets[:-1] + windows.sampled.new_lens - 1
        return torch.cat((ended, rows + num_rows)) if num_rows else rows

    def _chunks(
        self, contexts: ContextResult | None
    ) -> tuple[list[ContextChunk], tuple[list[int], torch.Tensor] | None, list[int]]:
        """The draft network's chunks, with 0 where a sampled token belongs; those rows, with their
        tokens; and the last rows of ended contexts, which are the same rows."""
        if contexts is None:
            return [], None, []
        chunks: list[ContextChunk] = []
        last_rows: list[int] = []
        end = 0
        for chunk, following in zip(contexts.chunks, contexts.following, strict=True):
            chunks.append(self.net.draft_chunk(chunk, following))
            end += len(chunks[-1].tokens)
            if following is None:
                last_rows.append(end - 1)
        if contexts.first_tokens is None:
            return chunks, None, []
        return chunks, (last_rows, contexts.first_tokens.clamp_min(0)), last_rows


class KeyReadingDrafter(NetworkDrafter):
    """Drafts with a network that has no keys of its own. It reads the target's, so that no round
    leaves anything for it to read."""

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        """Drafts are in the slots."""

    def launched(self, batch: ScheduledBatch) -> None:
        """Nothing is left unread."""

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        """Its steps are in the graphs of rounds."""

    def propose(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> Drafts | None:
        if self._choice is not None:
            self._choice.read(seen, group)
        if shape == NO_DRAFTS or not len(group.slots):
            return None
        if shape.is_copied:
            return copied(self._choice, group, shape)
        net, slots = self.net, self._slots
        kv_lens = gather_rows(slots.kv_lens, group.slots)
        rows, bound = self._newest_rows(seen)
        newest = gather_rows(slots.window[:, 0], group.slots).unsqueeze(1)
        first = Windows(group.slots, kv_lens, newest, bound)
        states = net.forward([], first, net.state_of(rows))
        return self._steps.draft(group, shape, kv_lens, states, bound)

    def _newest_rows(self, seen: RoundResult) -> tuple[torch.Tensor, int]:
        """The rows of the target's forward that the newest tokens come from, `[N]`, and a bound of
        the KV lengths after it."""
        ended, num_rows, bound, (contexts, windows) = list[int](), 0, 0, seen
        for chunk, following in (
            zip(contexts.chunks, contexts.following, strict=True) if contexts else ()
        ):
            num_rows, bound = num_rows + len(chunk.tokens), max(bound, chunk.end)
            if following is None:
                ended.append(num_rows - 1)
        if windows is None:
            return self._drafted_from(ended, None, None, num_rows), bound
        part = windows.windows.part if windows.sampled.rows is None else None
        rows = self._drafted_from(ended, windows, part, num_rows)
        captured = windows.captured_rows(num_rows)
        rows = rows if captured is None else gather_rows(captured, rows)
        return rows, max(bound, windows.windows.max_kv_len)
