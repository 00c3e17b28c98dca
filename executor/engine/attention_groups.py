"""The attention of a model's layer groups: each has a backend and the rows over its block table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.attention.interface import AttentionBackend, AttentionPlan, GroupAttention
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.kernels.move_kv import move_kv


@dataclass(frozen=True)
class PagedGroup:
    """A layer group. Groups whose pages have the same numbers share `rows`."""

    backend: AttentionBackend
    rows: RowBuilder


@dataclass(frozen=True)
class PlannedRows:
    """The rows of a forward: ids and positions `[T]`, and the planned attention of each group."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupAttention, ...]


class AttentionGroups:
    """All groups of one model. Ids and positions of rows are the same in each."""

    def __init__(self, groups: Sequence[PagedGroup]) -> None:
        self.groups = tuple(groups)

    @property
    def rows(self) -> RowBuilder:
        """The rows of the first group."""
        return self.groups[0].rows

    @property
    def supports_graphs(self) -> bool:
        """Whether CUDA graphs can hold generation windows."""
        return all(group.backend.supports_graphs for group in self.groups)

    def plan(
        self, contexts: list[ContextChunk], windows: Windows | None, *, only_writes: bool = False
    ) -> PlannedRows:
        """only_writes: plans no attention, only the writing of keys and values."""
        rows, planned = self.rows, list[GroupAttention]()
        metadata, token_ids = rows.build(contexts, windows)
        positions = metadata.positions
        for group in self.groups:
            if group.rows is not rows:
                rows = group.rows
                metadata, _ = rows.build(contexts, windows)
            plan = AttentionPlan(metadata.kv_slots) if only_writes else group.backend.plan(metadata)
            planned.append(GroupAttention(group.backend, plan))
        return PlannedRows(token_ids, positions, tuple(planned))

    def keep_paths(self, windows: Windows, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Moves the KV of the accepted rows of trees to the front of their windows: lens `[B]` of
        rows `[B, D+1]`."""
        num_pages = -(-windows.max_kv_len // self.rows.page_size)
        for group in self.groups:
            tables = group.rows.table.rows(windows.slots, num_pages)
            move_kv(group.backend.pool.planes, tables, windows.first, rows, lens)
