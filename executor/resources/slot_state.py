"""Device-resident state of running requests, one row a slot.

Everything that the next round needs from the previous one lives here, so that a round is: gather by
slot, compute, scatter by slot. The host writes a row when a request starts generating and keeps the
block tables current; it never has to read a row back. The last row is the dummy slot of graph
padding."""

from array import array

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.seq_slots import SeqSlotManager
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.kernels import slot_windows
from tllm_spec.kernels.row_copies import gather_rows
from tllm_spec.kernels.slot_tables import SlotTables, SyntheticRates


class SlotState:
    """`kv_lens` `[S]`: tokens in the cache; `window` `[S, K+1]`: the bonus token followed by
    drafts, next round's input; `num_drafts` `[S]`: how many of those drafts were really proposed;
    `previous_token` `[S]`: the token before the bonus token (a draft model re-reads it after a full
    acceptance)."""

    def __init__(self, slots: SeqSlotManager, max_draft_len: int, device: torch.device) -> None:
        num_rows = slots.dummy_slot + 1
        self.device = device
        self.max_draft_len = max_draft_len
        self.kv_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.window = torch.zeros((num_rows, max_draft_len + 1), dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.previous_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._draft_limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._steps = torch.arange(max_draft_len + 1, device=device).unsqueeze(
            1
        )  # to make it is a launch
        self._tables = SlotTables(self.kv_lens, self.window, self.num_drafts, self.previous_token)

    def start(self, request: LlmRequest) -> None:
        """The request was given a slot (again, after a preemption), or the round that had its
        drafts broke off."""
        self.num_drafts[request.slot].fill_(0)
        # Assigning a number to one element copies it from pageable memory, for which the host
        # waits.
        self._draft_limits[request.slot].fill_(request.draft_limit)

    def places(self, slot_ids: torch.Tensor, draft_len: int) -> torch.Tensor:
        """Positions of the bonus token and of the drafts behind it, `[K + 1, B]`."""
        return gather_rows(self.kv_lens, slot_ids) + self._steps[: draft_len + 1]

    def write_drafts(self, slot_ids: torch.Tensor, drafts: torch.Tensor) -> None:
        """drafts `[B, K]` for the next windows of the slots `[B]`; a request's own limit may be
        lower than K."""
        slot_windows.write_drafts(self._tables, slot_ids, drafts, self._draft_limits)

    def reset_dummy(self) -> None:
        """The dummy slot takes part in padded rounds and must not grow."""
        self.kv_lens[-1:].zero_()

    def start_generation(
        self, slot_ids: torch.Tensor, context_tail: torch.Tensor, first: torch.Tensor
    ) -> None:
        """Rows of requests whose context ended in this round. slot_ids, context_tail (last context
        token), first (sampled token): `[C]`. `kv_lens` was written with the context."""
        self.window[slot_ids, 0] = first.clamp_min(0)
        self.num_drafts.index_fill_(0, slot_ids, 0)
        self.previous_token[slot_ids] = context_tail

    def accept(
        self,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        targets: torch.Tensor,
        synthetic: SyntheticRates | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `accept_windows`: kv_lens `[B]`, targets `[B, W]` of generating slots `[B]`. Device
        work only."""
        return slot_windows.accept_windows(self._tables, slot_ids, kv_lens, targets, synthetic)

    def advance(
        self,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        new_tokens: torch.Tensor,
        new_lens: torch.Tensor,
    ) -> None:
        """After an acceptance of another kind: new_tokens `[B, W]`, new_lens `[B]`."""
        slot_windows.advance(self._tables, slot_ids, kv_lens, new_tokens, new_lens)


class BlockTable:
    """`[S, P]` int32 page numbers on the device; entries that changed are sent once a round.

    Neighbours are sent two at a time as one 64-bit number, the first in its low half as everything
    that CUDA runs on
    has it in memory: places and what belongs there are then one list, and a round in which pages
    were added is one copy and one write. P is even for this, `max_pages` or one more.

    The host keeps the rows, too: where a prompt's tokens go is a few numbers there, and many small
    kernels here."""

    def __init__(self, slots: SeqSlotManager, max_pages: int, device: torch.device) -> None:
        num_rows = slots.dummy_slot + 1
        self._pairs_a_row = -(-max_pages // 2)
        self.device_rows = torch.zeros(
            (num_rows, 2 * self._pairs_a_row), dtype=torch.int32, device=device
        )
        self._pairs = self.device_rows.view(torch.int64)
        self._host_rows = [array("i", bytes(8 * self._pairs_a_row)) for _ in range(num_rows)]
        self._changed: dict[int, int] = {}  # place in the flattened pairs -> pair

    def write(self, slot: int, pages: list[int], first_changed: int) -> None:
        """Pages from index `first_changed` on differ from what the row holds."""
        place = first_changed // 2
        changed = array("i", pages[2 * place :])
        self._host_rows[slot][2 * place : len(pages)] = changed
        if len(pages) % 2:
            changed.append(0)
        pairs = memoryview(changed).cast("b").cast("q")
        start = slot * self._pairs_a_row + place
        self._changed.update(zip(range(start, start + len(pairs)), pairs, strict=True))

    def pages(self, slot: int) -> "array[int]":
        """What the host has written to a slot's row, sent or not: live, so read it, do not change
        it."""
        return self._host_rows[slot]

    def flush(self) -> None:
        """Sends the changed entries; nothing happens in rounds in which no page was added."""
        if not self._changed:
            return
        sent = to_device(array("q", [*self._changed, *self._changed.values()]), self._pairs.device)
        places, pairs = sent.chunk(2)
        self._pairs.put_(places, pairs)
        self._changed.clear()

    def rows(self, slot_ids: torch.Tensor, num_pages: int) -> torch.Tensor:
        """The first `num_pages` pages of each slot, `[B, num_pages]`."""
        return self.device_rows[:, :num_pages].index_select(0, slot_ids)
