"""DeepSeek sparse attention: which keys each row attends to (arXiv 2512.02556, section 2.1). An
indexer scores all keys that the row sees, by keys of its own, and the `topk` best are chosen: by
higher score, then by lower position. A row that sees no more keys than that attends to all.

The choice is made on the device, so a CUDA graph can hold it. The rows of a forward whose lengths
cannot exceed `topk` skip it: their attention is that of latents without an indexer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.attention.geometry import IndexGeometry, KVPool
from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    FirstChoice,
    ForwardContext,
    slots_of,
)
from tllm_spec.kernels.attention.index_select import SeenKeys, select_keys
from tllm_spec.kernels.attention.index_write import IndexNorm, index_write
from tllm_spec.kernels.attention.rotary_write import Rotary


@dataclass(frozen=True)
class ChosenKeys:
    """The keys of S rows of a forward. Every layer with an indexer overwrites slots and counts;
    layers without one read what the newest has chosen."""

    rows: slice
    """The forward's rows that are meant."""
    slots: torch.Tensor
    """`[S, topk]` int32: the pool's slots of each row's keys, in order of their positions."""
    counts: torch.Tensor
    """`[S]` int32: how many of them there are."""

    def parts(self, most: int) -> Iterator["ChosenKeys"]:
        """The same in parts of at most `most` keys."""
        number, topk = self.slots.shape
        size = max(1, most // topk)
        for start in range(0, number, size):
            own, first = slice(start, start + size), self.rows.start + start
            rows = slice(first, min(first + size, self.rows.stop))
            yield ChosenKeys(rows, self.slots[own], self.counts[own])


@dataclass(frozen=True)
class IndexInputs:
    """What a layer gives its indexer."""

    keys: torch.Tensor
    """[T, D] as projected."""
    norm: IndexNorm
    queries: torch.Tensor
    """[T, H, D] as projected, contiguous; the rotated elements are overwritten."""
    weights: torch.Tensor
    """[T, H] float32: of the heads' scores."""


@dataclass(frozen=True)
class IndexPlan(AttentionPlan):
    """None: all rows attend to all keys. is_later: an earlier step has chosen, and nothing reads
    the rows' keys."""

    seen: SeenKeys | None
    chosen: ChosenKeys | None
    is_later: bool = False


def chosen_keys(context: ForwardContext) -> ChosenKeys | None:
    """Those of the newest layer with an indexer; None: rows attend to all keys."""
    plan = context.groups[-1][1]
    return plan.chosen if isinstance(plan, IndexPlan) else None


def first_choice(context: ForwardContext) -> FirstChoice:
    """What later steps take over from a first one: the choice of the wanted rows."""
    chosen, wanted = chosen_keys(context), context.wanted
    if chosen is None or wanted is None:
        return FirstChoice()
    slots, counts = (each.index_select(0, wanted) for each in (chosen.slots, chosen.counts))
    return FirstChoice(0, slots, counts)


def chosen_rows(metadata: AttentionMetadata, topk: int | None) -> slice:
    """The rows that may see more than `topk` keys: those of all chunks, of all windows, of both, or
    none. None: there is no indexer. Where steps share a choice, all rows or none."""
    first, lens = sum(metadata.context_lens), metadata.context_kv_lens
    if topk is not None and (shared := metadata.first_choice) is not None:
        longest = max((*lens, metadata.max_kv_len))
        is_chosen = shared.slots is not None if shared.step else longest > topk
        return slice(0, len(metadata.kv_slots)) if is_chosen else slice(first, first)
    start = 0 if topk is not None and max(lens, default=0) > topk else first
    has_windows = topk is not None and metadata.max_kv_len > topk
    return slice(start, len(metadata.kv_slots) if has_windows else first)


class IndexBackend(AttentionBackend):
    """Its pool has the page numbers of the latents."""

    supports_graphs = True

    def __init__(self, geometry: IndexGeometry, pool: KVPool) -> None:
        super().__init__(pool)
        self.geometry = geometry
        self._layers = pool.data.unbind(0)

    def plan(self, metadata: AttentionMetadata) -> IndexPlan:
        rows, topk = chosen_rows(metadata, self.geometry.topk), self.geometry.topk
        number, shared = rows.stop - rows.start, metadata.first_choice
        if shared is not None and shared.step:
            later = _later_keys(metadata, shared, self.pool.page_size) if number else None
            return IndexPlan(metadata.kv_slots, None, later, is_later=True)
        if not number:
            return IndexPlan(metadata.kv_slots, None, None)
        slots = metadata.block_tables.new_empty(number, topk)
        chosen = ChosenKeys(rows, slots, slots.new_empty(number))
        return IndexPlan(metadata.kv_slots, _seen_keys(metadata, rows), chosen)

    def choose(self, layer: int, inputs: IndexInputs, rotary: Rotary, plan: AttentionPlan) -> None:
        """Writes the rows' keys, then chooses keys for those of the plan."""
        assert isinstance(plan, IndexPlan) and plan.chosen is not None and plan.seen is not None
        self.write(layer, inputs.keys, inputs.norm, rotary, plan, inputs.queries)
        rows, chosen = plan.chosen.rows, plan.chosen
        queries, weights = inputs.queries[rows], inputs.weights[rows]
        own = self._layers[layer], plan.seen, chosen.slots, chosen.counts
        select_keys(queries, weights, *own)

    def write(
        self,
        layer: int,
        keys: torch.Tensor,
        norm: IndexNorm,
        rotary: Rotary,
        plan: AttentionPlan,
        queries: torch.Tensor | None = None,
    ) -> None:
        """Norm, rotate and write the rows' keys; rotate the queries, if there are any."""
        index_write(keys, queries, rotary, plan.kv_slots, self._layers[layer], norm)


def _later_keys(metadata: AttentionMetadata, shared: FirstChoice, page_size: int) -> ChosenKeys:
    """The keys of a first step, and for each row those of the drafts up to its own."""
    number, tables = len(metadata.kv_slots), metadata.block_tables
    seen = _seen_keys(metadata, slice(0, number))
    assert shared.slots is not None and shared.counts is not None
    slots, counts = (each.index_select(0, seen.requests) for each in (shared.slots, shared.counts))
    width = shared.step if metadata.tree is None else metadata.tree.length
    places = torch.arange(width, device=tables.device)
    positions = seen.ends.unsqueeze(1) + (places - (0 if seen.bits is not None else width))
    is_seen = torch.ones_like(positions)
    if seen.bits is not None:
        is_seen = (seen.bits.unsqueeze(1) >> places) & 1
    positions = positions.clamp_max(tables.shape[1] * page_size - 1)
    later = slots_of(tables.index_select(0, seen.requests), positions, page_size)
    columns = counts.unsqueeze(1) + is_seen.cumsum(1) - 1
    columns = torch.where(is_seen != 0, columns, slots.shape[1] + width - 1)  # which none has
    slots = F.pad(slots, (0, width)).scatter_(1, columns, later.to(torch.int32))
    return ChosenKeys(slice(0, number), slots, counts + is_seen.sum(1, dtype=torch.int32))


def _seen_keys(metadata: AttentionMetadata, rows: slice) -> SeenKeys:
    """What the rows of chunks, of windows, or of both see."""
    on, num_chunks = metadata.kv_slots.device, len(metadata.context_lens)
    requests, ends, bits, lens = list[torch.Tensor](), list[torch.Tensor](), None, list[int]()
    if rows.start < sum(metadata.context_lens):
        for number, length in enumerate(metadata.context_lens):
            lens.append(metadata.context_kv_lens[number])
            requests.append(torch.full((length,), number, device=on))
            ends.append(torch.arange(lens[-1] - length + 1, lens[-1] + 1, device=on))
    if rows.stop > sum(metadata.context_lens):
        own, tree, kv_lens = metadata.rows, metadata.tree, metadata.kv_lens[num_chunks:]
        lens.append(metadata.max_kv_len)
        numbers = torch.arange(num_chunks, num_chunks + own.num_requests, device=on)
        requests.append(own.expand(numbers))
        if tree is None:
            places = torch.arange(1, own.window + 1, device=on)
            ends.append(own.flat((kv_lens - own.counts).unsqueeze(1) + places))
        else:
            ends.append(own.expand(tree.starts(kv_lens)))
            bits = F.pad(tree.bits.flatten(), (rows.stop - rows.start - tree.bits.numel(), 0))
    numbers, own_ends = (torch.cat(each).to(torch.int32) for each in (requests, ends))
    return SeenKeys(numbers, own_ends, bits, metadata.block_tables, max(lens))
