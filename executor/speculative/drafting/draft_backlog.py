"""Positions that rounds without drafts leave unread by the draft layers on the target's pages.

A round of draft length 0 adds one position to every request. To read it at once would stream the
draft's weights for one token. Instead it is kept, and one forward reads up to `BACKLOG_LEN`
positions of all requests. The host counts a request's positions (`LlmRequest.draft_backlog`): such
a round adds exactly one, so the count is known before the round is read. The device keeps what they
are read from in a ring per slot.

A head reads hidden states, so it must read before its ring overflows. A draft model reads tokens
only: it waits until drafts are wanted, and takes what the ring lacks from the host's tokens."""

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.missed_tokens import missed_by, read_missed
from tllm_spec.kernels.slots.row_copies import Rings, gather_rows, store_in_rings

# With 4 query heads per KV head, such a window fills one tile of Triton's attention kernel. A
# longer one would cost prefix hits: a finished request's unread positions are not reused.
BACKLOG_LEN = 16
_backlog_of = attrgetter("draft_backlog")


class DraftBacklog:
    """What a draft network has not read yet: a ring of `BACKLOG_LEN` positions per slot.
    `max_requests` are read in one forward. A request has at most `max_unread` unread positions:
    `inf` for a network that reads tokens only."""

    def __init__(self, layers: DraftLayers, slots: SlotState, max_num_tokens: int) -> None:
        self.max_unread = inf if layers.net.reads_tokens_only else BACKLOG_LEN
        self.max_requests = max(1, max_num_tokens // BACKLOG_LEN)
        self._max_num_tokens = max_num_tokens
        self._layers = layers
        self._slots = slots
        self._graphs: SlotGraphs[None] | None = None
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        self._num_due = torch.zeros(len(slots.kv_lens), dtype=torch.int64, device=slots.device)
        size = len(slots.kv_lens) * BACKLOG_LEN
        captured = layers.net.captured(1)
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
        captured = self._layers.net.captured(first_row + len(windows.slots))
        states = captured[first_row:] if captured is not None and first_row else captured
        store_in_rings(self._rings, windows.slots, windows.first, new_tokens, states)

    def note(self, batch: ScheduledBatch) -> None:
        """Counts the positions of a batch that was launched."""
        if batch.new_shape == NO_DRAFTS:
            for request in batch.generation_requests:
                request.draft_backlog += 1

    def prepare(self, batch: ScheduledBatch) -> None:
        """Called before the batch runs. Its generating requests catch up if it drafts, or if one of
        them has as many unread positions as there may be."""
        longest = max(map(_backlog_of, batch.generation_requests), default=0)
        if longest > (0 if batch.new_shape != NO_DRAFTS else self.max_unread - 1):
            batch.catches_up = longest > BACKLOG_LEN
            self.read(batch.generation_requests)

    def read(self, requests: Sequence[LlmRequest]) -> None:
        """Lets the draft network read all unread positions of the requests."""
        late = [request for request in requests if request.draft_backlog > BACKLOG_LEN]
        # The rings have the last tokens, those of rounds in flight included.
        missed = [missed_by(request, BACKLOG_LEN) for request in late]
        read_missed(self._layers, missed, self._max_num_tokens)
        for request in late:
            request.draft_backlog = BACKLOG_LEN
        for first in range(0, len(requests), self.max_requests):
            some = requests[first : first + self.max_requests]
            slot_ids = self._send(some)
            slots = [request.slot for request in some]
            if self._graphs is None or self._graphs.run(slots, NO_DRAFTS, False) is None:
                self._catch_up(slot_ids, max(request.num_tokens_bound for request in some))
            for request in some:
                request.draft_backlog = 0

    def capture_graphs(self, target: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        """Captures the graphs that reading is run as where one of the keys' batch sizes fits."""
        sizes = {key.batch_size for key in keys if key.batch_size <= self.max_requests}
        self._graphs = target.for_same_slots(self._catch_up_for)
        self._graphs.capture(GraphKey(size, NO_DRAFTS, False) for size in sizes)

    def _catch_up_for(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> None:
        """The work of a graph, for contexts of any length."""
        self._catch_up(slot_ids, self._layers.rows.max_len)

    def _send(self, requests: Sequence[LlmRequest]) -> torch.Tensor:
        """Sends each request's count of unread positions. Returns the slots, `[B]`."""
        numbers = [[r.slot for r in requests], [r.draft_backlog for r in requests]]
        slots, num_due = to_device(numbers, self._slots.device).unbind(0)
        self._num_due[slots] = num_due
        return slots

    def _catch_up(self, slot_ids: torch.Tensor, max_kv_len: int) -> None:
        """Reads the unread positions of slots `[B]` for their K and V only. They are the last rows
        of windows that end where the slots end.

        A function of device tensors, so that a CUDA graph can capture it. max_kv_len: upper bound
        of the slots' lengths plus one."""
        net, rings = self._layers.net, self._rings
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
        self._layers.forward([], windows, state, wanted=self._no_rows)
