"""The interface between models and attention backends. The engine fills in the metadata.

Requests, scheduling and sampling are not known here, only rows, pages and lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.recurrent import RecurrentRows
from tllm_spec.kernels.attention.paged_prefill import PrefillLimits
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import copy_rows

# The target's hidden states that a draft head reads: which layers, and the buffer for them.
#
# The engine passes it to the target's forward; the drafter reads the buffer afterwards.


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """The low, middle and high layer whose outputs an EAGLE-3 head reads by default.

    Raises ValueError for a model that has too few layers for three different ones.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if num_layers < 7:
        raise ValueError(
            f"a model of {num_layers} layers has too few for the default capture layers, which "
            "need 7; set eagle3_layers_to_capture"
        )
    return layers


class SpecMetadata:
    """`layers`: ids of the layers whose outputs (residual included) are captured, in the order of
    the head's input; the number of layers, as an id, is the final norm. `buffer` `[T_max, n * H]`:
    the states of the latest forward's rows. `other`: is given the same outputs; None: there is none
    else who reads states."""

    def __init__(
        self,
        layers: tuple[int, ...],
        hidden_size: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.other: SpecMetadata | None = None
        self.buffer = torch.zeros(
            (max_num_tokens, len(layers) * hidden_size), dtype=dtype, device=device
        )
        # Views of the buffer by layer id, for as many rows as the latest forward had.
        self._columns: dict[int, torch.Tensor] = {}
        self._num_rows = -1

    def maybe_capture_hidden_states(self, layer_id: int, hidden: torch.Tensor) -> None:
        """Called after every layer with its output `[T, H]`, residual included; keeps it if the
        layer is captured."""
        if self.other is not None:
            self.other.maybe_capture_hidden_states(layer_id, hidden)
        if layer_id not in self.layers:
            return
        if hidden.shape[0] != self._num_rows:
            self._num_rows = hidden.shape[0]
            parts = self.buffer[: self._num_rows].chunk(len(self.layers), 1)
            self._columns = dict(zip(self.layers, parts, strict=True))
        copy_rows(hidden, self._columns[layer_id])

    @property
    def last_layer(self) -> int:
        """The last layer whose states are read."""
        own = max(self.layers)
        return own if self.other is None else max(own, self.other.last_layer)

    def captured(self, num_rows: int) -> torch.Tensor:
        """The states of the latest forward, `[T, n * H]`: a view that the next forward
        overwrites."""
        return self.buffer[:num_rows]


@dataclass(frozen=True)
class FirstChoice:
    """The keys that a draft network's indexer chooses in a round's first step only. Later steps
    attend to these and to the keys of the drafts before them."""

    step: int = 0
    """0 is the first one, which has not chosen yet."""
    slots: torch.Tensor | None = None
    """[N, topk] int32: the pool's slots of the keys that the N requests' drafts begin with; None:
    all of their keys."""
    counts: torch.Tensor | None = None
    """[N] int32: how many of them there are; None as above."""


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
    first_choice: FirstChoice | None = None
    """None: rows choose keys of their own, if there is an indexer."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a backend prepares once per forward for all layers; each backend adds fields. This base
    is enough for `write`."""

    kv_slots: torch.Tensor
    """[T] int64, as in the metadata."""


def slots_of(block_tables: torch.Tensor, keys: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots `[N, L]` of the tokens at positions `keys` `[N, L]` of requests with pages `[N, P]`."""
    return block_tables.gather(1, keys // page_size) * page_size + keys % page_size


def additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Added to the scores: -inf for keys that are hidden."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


class AttentionBackend(ABC):
    """Paged attention over one pool. Each geometry has a subclass with inputs of its own."""

    run: Callable[..., torch.Tensor]
    """Writes keys and values of one layer and attends; its layers know the arguments."""
    write: Callable[..., None]
    """The part of `run` before attention."""
    supports_graphs: bool = False
    """Whether generation windows read their lengths from the device, so that a CUDA graph can hold
    them."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def context_plans(self, limits: PrefillLimits) -> Any:
        """`FlashInferContexts` for CUDA graphs of context chunks; None if the plan of chunks
        depends on lengths on the host."""
        return None

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Masks and indices that all layers of one forward share."""


class HeadsInputs(NamedTuple):
    """What a layer gives its attention."""

    qkv: torch.Tensor
    """`[T, Hq + 2 * Hkv, D]`, contiguous, as projected; q and k may be overwritten. Or
    `[T, Hq, D]`: the rows' K and V are in the pool already, written by another layer."""
    norm: HeadWeights | None = None
    """What each head of q and k has before the rotation; None: nothing."""
    sinks: torch.Tensor | None = None
    """`[Hq]` float32, if the geometry has sinks."""


class HeadsBackend(AttentionBackend):
    """A backend for the pool of an `AttentionGeometry`."""

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(pool)
        self.geometry = geometry

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry, kv_format: KVFormat) -> int:
        """Device memory that each instance allocates besides the pool, for memory planning."""
        return 0

    def writes(self, qkv: torch.Tensor) -> bool:
        """Whether `[T, N, D]` has keys and values to be written."""
        return qkv.shape[1] > self.geometry.num_heads

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `[T, Hq + 2 * Hkv, D]`: q `[T, Hq, D]` and kv `[T, 2, Hkv, D]`."""
        geometry = self.geometry
        q, kv = qkv.split_with_sizes((geometry.num_heads, 2 * geometry.num_kv_heads), 1)
        return q, kv.view(-1, 2, geometry.num_kv_heads, geometry.head_dim)

    @abstractmethod
    def run(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        """Normalise and rotate the rows' q and k, write their K and V into the pool, then attend
        causally to all keys of the row's request, or to those that the metadata's tree names; with
        the geometry's `span` only to those that it has.

        Args:
            layer: index into the pool's layers.
            rotary: of this forward's positions.
            plan: of this forward.

        Returns:
            `[T, Hq * D]`.
        """

    def write(self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan) -> None:
        """The part of `run` before attention, with the same arguments: for rows whose outputs are
        not needed."""
        pages = self.pool.data[layer] if self.writes(inputs.qkv) else None
        scales = self.pool.scales[layer]
        rotary_write(inputs.qkv, rotary, plan.kv_slots, pages, inputs.norm, scales)


# The attention of a layer group in one forward.
GroupAttention = tuple[AttentionBackend, AttentionPlan]


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
