"""The interface between models and attention backends. The engine fills in the metadata.

Requests, scheduling and sampling are not known here, only rows, pages and lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.recurrent import RecurrentRows
from tllm_spec.attention.spec_metadata import SpecMetadata
from tllm_spec.kernels.attention.paged_prefill import PrefillLimits
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass
class AttentionMetadata:
    """The rows of one forward: first C context chunks one after another, then B generation
    windows; T rows in total.

    The rows of a request are its last tokens, up to `kv_lens`. The lengths of generation requests
    are on the device; the host has only the bound `max_kv_len`. A row of `block_tables` may be
    padded with any valid page."""

    context_lens: tuple[int, ...]
    """[C] query tokens of each chunk, host."""
    context_kv_lens: tuple[int, ...]
    """[C] cached + chunk tokens, host."""
    rows: RoundRows
    """The rows of the B generation requests, in order: a bonus token and drafts, at most W each.
    Rows of windows with padding are a rectangle."""
    block_tables: torch.Tensor
    """[C + B, P] int32, device; pages of each request."""
    kv_lens: torch.Tensor
    """[C + B] int32, device; tokens in the cache after this forward (cached + query)."""
    positions: torch.Tensor
    """[T] int64, device."""
    kv_slots: torch.Tensor
    """[T] int64, device; page * page_size + offset where each row's K/V goes."""
    max_kv_len: int
    """Host upper bound over the generation rows of kv_lens."""
    num_padding: torch.Tensor | None = None
    """[B] int64, device: how many rows at the start of each window are padding. Their K and V are
    written to `kv_slots`, and no row attends to them. The pool may hold keys of the request at
    their positions. None: no padding."""
    tree: TreeMask | None = None
    """Which keys the generation rows see, with R = W. Then `kv_slots` are those of the last W keys,
    `positions` follow the depths in the tree, and there is no padding. None: each row sees the keys
    up to its own."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a backend prepares once per forward for all layers; each backend adds fields. This base
    is enough for `write`."""

    kv_slots: torch.Tensor
    """[T] int64, as in the metadata."""


class ContextPlans(Protocol):
    """A plan of context chunks in memory with fixed addresses, so that a CUDA graph can hold their
    forward."""

    def fits(self, kv_lens: Sequence[int]) -> bool:
        """Whether chunks of requests with so many tokens can be planned."""

    def update(self, lens: Sequence[int], kv_lens: Sequence[int], pages: torch.Tensor) -> None:
        """The next replay runs chunks of `lens` tokens, as many as the limits say, and no windows.
        kv_lens: as `context_kv_lens`. pages: int32, on the device: the pages that hold the first
        chunk's request up to its length, then those of the second's, and so on."""

    def for_graph(self, kv_slots: torch.Tensor) -> AttentionPlan:
        """The plan for capturing a forward of T rows; `kv_slots` `[T]` holds the slots of the rows
        of each replay."""


class AttentionBackend(ABC):
    """Paged attention over one pool. Each `KVLayout` has a subclass with inputs of its own."""

    supports_graphs: bool = False
    """Whether generation windows read their lengths from the device, so that a CUDA graph can hold
    them."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def context_plans(self, limits: PrefillLimits) -> ContextPlans | None:
        """Plans for CUDA graphs of context chunks; None if the plan of chunks depends on lengths on
        the host."""
        return None

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Masks and indices that all layers of one forward share."""


class HeadsBackend(AttentionBackend):
    """A backend for the pool of a `HeadsLayout`."""

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(pool)
        self.geometry = geometry

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry, kv_format: KVFormat) -> int:
        """Device memory that each instance allocates besides the pool, for memory planning."""
        return 0

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `[T, Hq + 2 * Hkv, D]`: q `[T, Hq, D]` and kv `[T, 2, Hkv, D]`."""
        geometry = self.geometry
        q, kv = qkv.split_with_sizes((geometry.num_heads, 2 * geometry.num_kv_heads), 1)
        return q, kv.view(-1, 2, geometry.num_kv_heads, geometry.head_dim)

    @abstractmethod
    def run(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        norm: HeadWeights | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise and rotate the rows' q and k, write their K and V into the pool, then attend
        causally to all keys of the row's request, or to those that the metadata's tree names; with
        the geometry's `span` only to those that it has.

        Args:
            layer: index into the pool's layers.
            qkv: `[T, Hq + 2 * Hkv, D]`, contiguous, as projected; q and k may be overwritten.
            rotary: of this forward's positions.
            plan: of this forward.
            norm: of each head of q and k, before the rotation; None: none.
            sinks: `[Hq]` float32, if the geometry has sinks.

        Returns:
            `[T, Hq * D]`.
        """

    def write(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        norm: HeadWeights | None = None,
    ) -> None:
        """The part of `run` before attention, with the same arguments: for rows whose outputs are
        not needed."""
        scales = self.pool.kv_format.scales_of(layer)
        rotary_write(qkv, rotary, plan.kv_slots, self.pool.data[layer], norm, scales)


@dataclass(frozen=True)
class GroupAttention:
    """The attention of a layer group in one forward."""

    backend: AttentionBackend
    plan: AttentionPlan

    @property
    def heads_backend(self) -> HeadsBackend:
        assert isinstance(self.backend, HeadsBackend)
        return self.backend


@dataclass(frozen=True)
class ForwardContext:
    """What a model's forward gets besides tokens and positions."""

    groups: tuple[GroupAttention, ...]
    """The model's layer groups, in order."""
    spec: SpecMetadata | None = None
    """Captures the hidden states that a draft head reads; None without such a head."""
    wanted: torch.Tensor | None = None
    """[R] int64, device: the rows that the model returns. The other rows end in the last layer,
    which writes their keys and values and nothing else; what `spec` captures after that layer has
    the R rows only. None: all rows."""
    recurrent: RecurrentRows | None = None
    """The rows of layers with a recurrent state; None: the model has none."""
