"""Device-resident state of running requests, one row per slot.

All that the next round needs from the previous one lives here. A round gathers by slot, computes,
and scatters by slot. The host writes a row when a request starts generating, keeps the block tables
current, and never reads a row back. The last row is the dummy slot, for padding requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import SeqSlotManager
from tllm_spec.kernels.slots import slot_windows
from tllm_spec.kernels.slots.accept import Drafts, DraftTree, SlotTables, TreeTables
from tllm_spec.kernels.slots.choose_rows import DraftValues, choose_rows, features_of, learn_values
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import gather_rows


@dataclass(frozen=True)
class WindowTree:
    """The trees of B windows of W rows. Row 0 is the root, a parent comes before its children.
    `depth` (D): drafts that may be accepted, at most."""

    depth: int
    depths: torch.Tensor
    """`[B, W]` int64, contiguous."""
    bits: torch.Tensor
    """`[B, W]` int64, contiguous: which rows each row sees, its own included."""

    def split(self, sizes: Sequence[int]) -> list[WindowTree]:
        depths, bits = (each.split_with_sizes(list(sizes)) for each in (self.depths, self.bits))
        return [WindowTree(self.depth, *part) for part in zip(depths, bits, strict=True)]

    def of(self, requests: torch.Tensor | None) -> WindowTree:
        """The trees of some of the B requests; None: of all."""
        if requests is None:
            return self
        depths, bits = (each.index_select(0, requests) for each in (self.depths, self.bits))
        return WindowTree(self.depth, depths, bits)

    @property
    def paths(self) -> torch.Tensor:
        """`[B, W, W]` bool: whether each row is, or comes after, the draft of each column."""
        columns = torch.arange(self.bits.shape[1], device=self.bits.device)
        return ((self.bits.unsqueeze(2) >> columns) & 1).bool() & (columns > 0)


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
        self.counts_drafts, self.dummy_slot = counts_drafts, slots.dummy_slot
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
        # Where drafts may be trees: how the rows of each window follow each other.
        size = shapes.longest.window, device
        self.trees = _new_trees(num_rows, *size) if shapes.has_trees else None
        self._chain = _chain_tree(*size) if shapes.has_trees else None
        own = self.kv_lens, self.window, self.num_drafts, self.previous_token
        self.tables = SlotTables(*own, self.trees)
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

    def write(self, slot_ids: torch.Tensor, drafts: Drafts) -> None:
        """Writes drafts to the next windows of slots `[B]`, up to the length or depth that the
        request limits them to. Rows after them stay as they are: they are never accepted."""
        if self.values is not None and drafts.likely is not None:
            features = features_of(drafts.likely)
            self.values.features[slot_ids, : features.shape[1]] = features
        if self._chain is not None and not isinstance(drafts, DraftTree):
            drafts = _as_tree(drafts, self._chain)
        slot_windows.write_drafts(self.tables, slot_ids, drafts, self._draft_limits)

    def num_verified(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor:
        """How many real drafts the windows of this shape of slots `[B]` have, `[B]`, before the
        slots advance."""
        return gather_rows(self.num_drafts, slot_ids).clamp_max(shape.num_nodes)

    def num_real(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor:
        """As `num_verified`; for trees, on the longest path."""
        numbers = self.num_verified(slot_ids, shape)
        return self._on_longest_path(slot_ids, numbers, shape)

    def _on_longest_path(
        self, slot_ids: torch.Tensor, numbers: torch.Tensor, shape: DraftShape
    ) -> torch.Tensor:
        """How many of the first `numbers` `[B]` drafts of slots `[B]` are on the longest path that
        windows of this shape verify. A tree that was drafted for another shape may be deeper."""
        if self.trees is None:
            return numbers
        depths = self.trees.depths[slot_ids, numbers]  # nodes are ordered by depth
        return depths.clamp_max(shape.depth)

    def tree(self, slot_ids: torch.Tensor, shape: DraftShape) -> WindowTree:
        """The trees in windows of this shape of slots `[B]`, where drafts may be trees."""
        assert self.trees is not None
        depths = gather_rows(self.trees.depths[:, : shape.window], slot_ids)
        bits = gather_rows(self.trees.bits[:, : shape.window], slot_ids)
        return WindowTree(shape.depth, depths, bits)

    def parents(self, slot_ids: torch.Tensor, width: int) -> torch.Tensor:
        """`[B, W]`: of the rows of trees in windows of slots `[B]`; -1 for the root and for rows
        that are padding."""
        assert self.trees is not None
        parents = self.trees.parents.index_select(0, slot_ids)[:, :width]
        last = self.num_drafts.index_select(0, slot_ids).unsqueeze(1)
        return parents.masked_fill(torch.arange(width, device=self.device) > last, -1)

    def dummies(self, number: int) -> torch.Tensor:
        """`[number]` times the dummy slot."""
        return torch.full((number,), self.dummy_slot, device=self.device)

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

    def limit_drafts(self, slot_ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """Only drafts that have a row in this round are verified, of slots `[B]` whose rows have
        these offsets."""
        num_drafts = self.num_drafts.index_select(0, slot_ids)
        self.num_drafts[slot_ids] = torch.minimum(num_drafts, offsets.diff() - 1)

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


def _as_tree(drafts: Drafts, chain: TreeTables) -> DraftTree:
    """Chains in slots that may have trees."""
    batch, length = drafts.tokens.shape
    rows = {name: row[: 1 + length].expand(batch, -1) for name, row in vars(chain).items()}
    return DraftTree(drafts.tokens, drafts.num_drafts, **rows)


def _new_trees(num_slots: int, width: int, device: torch.device) -> TreeTables:
    """The trees of S slots in windows of W rows, before any was written: each row sees the root and
    itself."""
    rows = torch.arange(width, device=device)
    parents, depths = torch.full_like(rows, -1), (rows > 0).to(torch.int64)
    bits = (torch.ones_like(rows) << rows) | 1
    return TreeTables(*(each.repeat(num_slots, 1) for each in (parents, depths, bits)))


def _chain_tree(width: int, device: torch.device) -> TreeTables:
    """A chain as a tree, `[W]` each."""
    rows = torch.arange(width, device=device)
    return TreeTables(rows - 1, rows, (torch.full_like(rows, 2) << rows) - 1)
