"""Device-resident state of running requests, one row per slot.

All that the next round needs from the previous one lives here. A round gathers by slot, computes,
and scatters by slot. The host writes a row when a request starts generating, keeps the block tables
current, and never reads a row back. The last row is the dummy slot, for padding requests."""

from array import array

import torch

from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.executor.resources.window_tree import SlotTrees, WindowTree
from tllm_spec.kernels.drafts.draft_beams import DraftTree
from tllm_spec.kernels.drafts.path_trees import path_ranks
from tllm_spec.kernels.slots import slot_windows
from tllm_spec.kernels.slots.accept import Accepted, SlotTables, SyntheticRates, TreeRates
from tllm_spec.kernels.slots.choose_rows import DraftValues, choose_rows, features_of, learn_values
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.kernels.slots.slot_trees import accept_trees, write_trees


class SlotState:
    """The tensors of S slots.

    `kv_lens` `[S]`: tokens in the KV cache. `window` `[S, W]`: the next round's input, the bonus
    token and then drafts. `num_drafts` `[S]`: how many of these drafts were proposed, the rest is
    padding. `previous_token` `[S]`: the token before the bonus token, which a draft model reads
    again after a full acceptance. `counts_drafts`: each round's results say how many drafts each
    request really had. `values`: what is known of the drafts where requests share
    a round's rows; otherwise None."""

    def __init__(
        self,
        slots: SeqSlotManager,
        shapes: DraftShapes,
        device: torch.device,
        *,
        counts_drafts: bool = False,
    ) -> None:
        self.counts_drafts = counts_drafts
        num_rows, max_draft_len = slots.dummy_slot + 1, shapes.longest.depth
        self.device = device
        self.shapes = shapes
        self.max_draft_len = max_draft_len
        self.kv_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.window = torch.zeros(
            (num_rows, shapes.longest.window), dtype=torch.int64, device=device
        )
        self.num_drafts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.previous_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._draft_limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Kept: to make it would be a launch in every round.
        self._steps = torch.arange(max_draft_len + 1, device=device).unsqueeze(1)
        # Where drafts are trees: how the rows of each window follow each other.
        self._trees = (
            SlotTrees(num_rows, shapes.longest.window, device) if shapes.has_trees else None
        )
        self._tables = SlotTables(self.kv_lens, self.window, self.num_drafts, self.previous_token)
        self._expected = torch.zeros(
            (num_rows, len(shapes.budgets)), dtype=torch.int64, device=device
        )
        self.values = (
            DraftValues.of_slots(num_rows, shapes.longest.num_nodes, device, shapes.budgets)
            if shapes.are_ragged
            else None
        )

    def start(self, request: LlmRequest) -> None:
        """Called when the request gets a slot (again after a preemption), or when the round with
        its drafts has raised."""
        self.num_drafts[request.slot].fill_(0)
        # Filled, not assigned: assigning copies from pageable memory, and the host waits for that.
        self._draft_limits[request.slot].fill_(request.draft_limit)
        if self.values is not None:
            self.values.of_slot[request.slot].fill_(0)
            self.values.num_idle[request.slot].fill_(0)

    def positions(self, kv_lens: torch.Tensor, draft_len: int) -> torch.Tensor:
        """Positions of the bonus token and of the drafts after it, `[K + 1, B]`, in slots with
        these KV lengths `[B]`."""
        return kv_lens + self._steps[: draft_len + 1]

    def write_drafts(
        self,
        slot_ids: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
    ) -> None:
        """Writes drafts `[B, K]` to the next windows of slots `[B]`. num_drafts `[B]`: how many of
        them are proposed, unless the request's own limit is lower; None: K. probs `[B, K]`: of the
        drafts, where the drafter knows them."""
        slot_windows.write_drafts(self._tables, slot_ids, drafts, self._draft_limits, num_drafts)
        if self.values is not None and probs is not None:
            self.values.features[slot_ids, : probs.shape[1]] = features_of(probs)
        if self._trees is not None:
            self._trees.write_chains(slot_ids, drafts.shape[1])

    def num_verified(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor | None:
        """How many real drafts the windows of this shape of slots `[B]` have, `[B]`; None: the host
        knows. Before the slots advance."""
        if not self.counts_drafts:
            return None
        return gather_rows(self.num_drafts, slot_ids).clamp_max(shape.num_nodes)

    def num_real(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor:
        """As `num_verified`, also where the host knows it; for trees, on the longest path."""
        numbers = gather_rows(self.num_drafts, slot_ids).clamp_max(shape.num_nodes)
        return self._on_longest_path(slot_ids, numbers, shape)

    def _on_longest_path(
        self, slot_ids: torch.Tensor, numbers: torch.Tensor, shape: DraftShape
    ) -> torch.Tensor:
        """How many of the first `numbers` `[B]` drafts of slots `[B]` are on the longest path that
        windows of this shape verify. A tree that was drafted for another shape may be deeper."""
        if self._trees is None:
            return numbers
        depths = self._trees.tables.depths[slot_ids, numbers]  # nodes are ordered by depth
        return depths.clamp_max(shape.depth)

    def tree(self, slot_ids: torch.Tensor, shape: DraftShape) -> WindowTree | None:
        """The trees in windows of this shape of slots `[B]`; None: they are chains."""
        if self._trees is None or not shape.num_nodes:
            return None
        return self._trees.take(slot_ids, shape)

    def parents(self, slot_ids: torch.Tensor, width: int) -> torch.Tensor:
        """`[B, W]`: of the rows of trees in windows of slots `[B]`; -1 for the root and for rows
        that are padding."""
        assert self._trees is not None
        parents = self._trees.parents.index_select(0, slot_ids)[:, :width]
        last = self.num_drafts.index_select(0, slot_ids).unsqueeze(1)
        return parents.masked_fill(torch.arange(width, device=self.device) > last, -1)

    def write_tree(self, slot_ids: torch.Tensor, tree: DraftTree) -> None:
        """Writes trees to the next windows of slots `[B]`, up to the depth that the request limits
        drafts to. Nodes are ordered by depth. Rows after the tree's stay as they are: they are
        never accepted."""
        assert self._trees is not None
        write_trees(self._tables, self._trees.tables, slot_ids, tree, self._draft_limits)

    def reset_dummy(self) -> None:
        """Padded rounds advance the dummy slot too; it must not grow."""
        self.kv_lens[-1:].zero_()

    def start_generation(
        self, slot_ids: torch.Tensor, context_tail: torch.Tensor, first: torch.Tensor
    ) -> None:
        """Writes the rows of requests whose context ended in this round. slot_ids, context_tail
        (last context token) and first (sampled token): `[C]`. `kv_lens` is written already."""
        self.window[slot_ids, 0] = first.clamp_min(0)
        self.num_drafts.index_fill_(0, slot_ids, 0)
        self.previous_token[slot_ids] = context_tail

    def limit_drafts(self, slot_ids: torch.Tensor, rows: RoundRows) -> None:
        """Only drafts that have a row in this round are verified, of slots `[B]` with `rows`."""
        if rows.offsets is not None:
            num_drafts = self.num_drafts.index_select(0, slot_ids)
            self.num_drafts[slot_ids] = torch.minimum(num_drafts, rows.offsets.diff() - 1)

    def choose_rows(self, slot_ids: torch.Tensor, shape: DraftShape, num_rows: int) -> RoundRows:
        """The rows of a round's windows of slots `[B]`. Drafts without a row are not verified."""
        assert self.values is not None
        window = shape.window
        chosen = choose_rows(self.values, self.num_drafts, slot_ids, window, num_rows)
        self.num_drafts[slot_ids] = chosen.num_verified
        if self._expected.shape[1]:
            self._expected[slot_ids] = chosen.expected
        return RoundRows(len(slot_ids), window, num_rows, chosen.offsets)

    def reported(
        self, slot_ids: torch.Tensor, num_verified: torch.Tensor, shape: DraftShape
    ) -> torch.Tensor:
        """`SampledTokens.num_drafts` of a round of slots `[B]`, for the host."""
        columns = self._on_longest_path(slot_ids, num_verified, shape).unsqueeze(1)
        num_budgets = self._expected.shape[1]
        if not num_budgets:
            return columns
        if not shape.is_ragged:
            return torch.nn.functional.pad(columns, (0, num_budgets))
        return torch.cat((columns, self._expected.index_select(0, slot_ids)), 1)

    def learn(
        self, slot_ids: torch.Tensor, num_verified: torch.Tensor, new_lens: torch.Tensor
    ) -> None:
        """A round of slots `[B]` has verified as many drafts and emitted as many tokens."""
        if self.values is not None:
            learn_values(self.values, num_verified, slot_ids, new_lens)

    def accept(
        self,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        targets: torch.Tensor,
        synthetic: SyntheticRates | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `accept_windows`. kv_lens `[B]` and the target's tokens `[B, W]` of slots `[B]`.
        Device work only."""
        return slot_windows.accept_windows(self._tables, slot_ids, kv_lens, targets, synthetic)

    def accept_tree(
        self,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        targets: torch.Tensor,
        depth: int,
        synthetic: TreeRates | None,
    ) -> Accepted:
        """See `accept_trees`; otherwise as `accept`."""
        assert self._trees is not None
        parents = self._trees.parents
        return accept_trees(self._tables, parents, slot_ids, kv_lens, targets, depth, synthetic)

    def path_ranks(
        self,
        slot_ids: torch.Tensor,
        num_drafts: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """See `kernels.path_ranks`."""
        assert self._trees is not None
        return path_ranks(self._trees.parents, slot_ids, num_drafts, rows, lens, width)

    def advance(
        self,
        slot_ids: torch.Tensor,
        kv_lens: torch.Tensor,
        new_tokens: torch.Tensor,
        new_lens: torch.Tensor,
    ) -> None:
        """The rounds of slots `[B]` have emitted new_lens `[B]` of new_tokens `[B, D+1]`."""
        slot_windows.advance(self._tables, slot_ids, kv_lens, new_tokens, new_lens)


class BlockTable:
    """`[S, P]` int32 page numbers on the device. Changed entries are sent once per round.

    Two neighbours are sent as one 64-bit number, the first in its low half (every host of CUDA is
    little-endian). Indices and values are then one list of 64-bit numbers, sent in one copy and
    written by one kernel. P is even for this: `max_pages` or one more.

    The host keeps a copy of the rows: it finds the KV slots of a prompt's tokens in a few numbers,
    for which the device would need many small kernels."""

    def __init__(self, slots: SeqSlotManager, max_pages: int, device: torch.device) -> None:
        num_rows = slots.dummy_slot + 1
        self._pairs_per_row = -(-max_pages // 2)
        self.device_rows = torch.zeros(
            (num_rows, 2 * self._pairs_per_row), dtype=torch.int32, device=device
        )
        self._pairs = self.device_rows.view(torch.int64)
        self._host_rows = [array("i", bytes(8 * self._pairs_per_row)) for _ in range(num_rows)]
        self._changed: dict[int, int] = {}  # index in the flattened pairs -> pair

    def write(self, slot: int, pages: list[int], first_changed: int) -> None:
        """Sets a slot's row. The pages before index `first_changed` are in it already."""
        first_pair = first_changed // 2
        changed = array("i", pages[2 * first_pair :])
        self._host_rows[slot][2 * first_pair : len(pages)] = changed
        if len(pages) % 2:
            changed.append(0)
        pairs = memoryview(changed).cast("b").cast("q")
        start = slot * self._pairs_per_row + first_pair
        self._changed.update(zip(range(start, start + len(pairs)), pairs, strict=True))

    def pages(self, slot: int) -> "array[int]":
        """The host's copy of a slot's row, with what is not sent yet. Live: do not change it."""
        return self._host_rows[slot]

    def flush(self) -> None:
        """Sends the changed entries. Does nothing if there are none, as in most rounds."""
        if not self._changed:
            return
        sent = to_device(array("q", [*self._changed, *self._changed.values()]), self._pairs.device)
        indices, pairs = sent.chunk(2)
        self._pairs.put_(indices, pairs)
        self._changed.clear()

    def rows(self, slot_ids: torch.Tensor, num_pages: int) -> torch.Tensor:
        """The first `num_pages` pages of each slot, `[B, num_pages]`."""
        return self.device_rows[:, :num_pages].index_select(0, slot_ids)
