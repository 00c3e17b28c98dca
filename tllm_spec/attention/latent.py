"""MLA backends (arXiv 2405.04434, section 2.1), for the pool of a `LatentGeometry`.

Context chunks run in the expanded form: keys and values of all heads are projected from the
latents in the pool, those of earlier chunks and of cached prefixes included. Generation windows run
in the absorbed form over the latents themselves, and so do all rows whose keys an indexer
chooses."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from tllm_spec.attention.geometry import KVPool, LatentGeometry
from tllm_spec.attention.indexed import ChosenKeys, chosen_rows
from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    additive_mask,
    slots_of,
)
from tllm_spec.kernels.attention.kv_codes import times
from tllm_spec.kernels.attention.latent_attention import (
    MAX_PARTIAL_ROWS,
    LatentTables,
    latent_attention,
)
from tllm_spec.kernels.attention.latent_prefill import (
    MAX_EXPANDED_TOKENS,
    ExpandedPart,
    expanded_attention,
)
from tllm_spec.kernels.attention.latent_write import LatentNorm, latent_write
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.attention.visible_keys import hidden_keys
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.gemm.head_gemm import head_gemm
from tllm_spec.kernels.slots.round_rows import RoundRows

# Rows of chosen keys are in the absorbed form for so many pairs of row and key at a time.
MAX_CHOSEN_KEYS = 1 << 20


class UpAdapters(Protocol):
    """What rows' adapters add to the projections of latents, if any row has one."""

    def expanded(self, latents: torch.Tensor, part: ExpandedPart, total: torch.Tensor) -> None:
        """Add to keys and values of all heads, as `latent_prefill.Adds`."""

    def queries(self, q: torch.Tensor, rows: slice, total: torch.Tensor) -> None:
        """Add to queries for latents `[T, H, R]`, of the rows' queries `[T, H, N]`."""

    def values(self, mixed: torch.Tensor, rows: slice, total: torch.Tensor) -> None:
        """Add to values `[T, H, V]`, of weighted latents `[T, H, R]`."""


@dataclass(frozen=True)
class LatentInputs:
    """What a layer gives its attention."""

    q: torch.Tensor
    """[T, H, N + P], contiguous, as projected; the last P elements of each head are overwritten."""
    latent: torch.Tensor
    """[T, R + P] as projected, any stride between rows: the latent, then the shared key."""
    norm: LatentNorm
    up: torch.Tensor
    """[H, N + V, R], contiguous: each head's projections of the latent to key and value."""
    chosen: ChosenKeys | None = None
    """The keys of rows that do not attend to all."""
    adapters: UpAdapters | None = None
    """None: there are none."""


Windows = tuple[LatentTables | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LatentPlan(AttentionPlan):
    """The chunks, in parts, then the windows, if there are any, from row `first` on."""

    first: int
    contexts: tuple[ExpandedPart, ...]
    windows: LatentTables | None
    slots: torch.Tensor | None
    """[B * L] int64: the pool's slots of all keys of windows; None: the kernel reads the block
    tables."""
    mask: torch.Tensor | None
    """[B, 1, W * H, L], added to the scores; None as above."""


class LatentBackend(AttentionBackend):
    """A request's result depends on its own tokens only."""

    def __init__(self, geometry: LatentGeometry, pool: KVPool) -> None:
        super().__init__(pool)
        self.geometry = geometry
        self._layers = pool.data.unbind(0)
        self._workspace = WindowWorkspace.allocate(
            geometry.latent_dim, pool.data.device, MAX_PARTIAL_ROWS
        )

    @classmethod
    def workspace_bytes(cls, geometry: LatentGeometry, dtype: torch.dtype) -> int:
        """Device memory that each instance allocates besides the pool, and what a forward expands
        at a time: projected, keys and padded values."""
        key_dim = geometry.nope_dim + geometry.rope_dim
        elements = geometry.num_heads * (geometry.nope_dim + geometry.value_dim + 2 * key_dim)
        partials = MAX_PARTIAL_ROWS * (geometry.latent_dim + 1) * torch.float32.itemsize
        return MAX_EXPANDED_TOKENS * (elements + geometry.entry_dim) * dtype.itemsize + partials

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        windows: Windows = None, None, None
        first, contexts = sum(metadata.context_lens), tuple[ExpandedPart, ...]()
        chosen = chosen_rows(metadata, self.geometry.topk)
        if metadata.rows.num_requests and chosen.stop <= first:
            windows = self._plan_windows(metadata)
        if chosen.start:
            contexts = tuple(self._plan_contexts(metadata))
        return LatentPlan(metadata.kv_slots, first, contexts, *windows)

    def run(
        self, layer: int, inputs: LatentInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        """Norm and write the rows' latents and rotated keys into the pool, then attend causally to
        all keys of the row's request, or to the chosen ones. Returns `[T, H * V]`."""
        assert isinstance(plan, LatentPlan)
        self.write(layer, inputs.latent, inputs.norm, rotary, plan, inputs.q)
        geometry, q, scales = self.geometry, inputs.q, self.pool.scales[layer]
        output = q.new_empty(len(q), geometry.num_heads, geometry.value_dim)
        adapters = inputs.adapters
        adds = None if adapters is None else adapters.expanded
        expanded_attention(
            q, self._layers[layer], inputs.up, plan.contexts, geometry.scale, output, scales, adds
        )
        if plan.windows is not None:
            windows = slice(plan.first, len(q))
            self._absorbed(inputs, windows, output, partial(self._run_windows, layer, plan=plan))
        for keys in () if inputs.chosen is None else inputs.chosen.parts(MAX_CHOSEN_KEYS):
            self._absorbed(inputs, keys.rows, output, partial(self._run_chosen, layer, keys=keys))
        return output.flatten(1)

    def _absorbed(
        self,
        inputs: LatentInputs,
        rows: slice,
        output: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Writes the rows of `output` `[T, H, V]`. attend: as `latent_attention`, for absorbed and
        other queries."""
        geometry, adapters, own = self.geometry, inputs.adapters, inputs.q[rows]
        keys, values = inputs.up.split_with_sizes((geometry.nope_dim, geometry.value_dim), 1)
        absorbed = own.new_empty(geometry.num_heads, len(own), geometry.latent_dim)
        plain = own[..., : geometry.nope_dim]
        head_gemm(plain, keys, absorbed.transpose(0, 1))
        if adapters is not None:
            adapters.queries(plain, rows, absorbed.transpose(0, 1))
        mixed = attend(absorbed, own).transpose(0, 1)
        head_gemm(mixed, values.mT, output[rows])
        if adapters is not None:
            adapters.values(mixed, rows, output[rows])

    def _run_chosen(
        self, layer: int, q_latent: torch.Tensor, q: torch.Tensor, keys: ChosenKeys
    ) -> torch.Tensor:
        """Each row is a window of its own, whose pages are the chosen slots."""
        entries = self._layers[layer].flatten(0, 1).unsqueeze(1)
        rows = RoundRows.rectangle(len(q), 1)
        tables = LatentTables(rows, keys.slots, keys.counts)
        own = entries, tables, self.geometry.scale, self._workspace
        return latent_attention(q_latent, q, *own, self.pool.scales[layer])

    def write(
        self,
        layer: int,
        latent: torch.Tensor,
        norm: LatentNorm,
        rotary: Rotary,
        plan: AttentionPlan,
        q: torch.Tensor | None = None,
    ) -> None:
        """The part of `run` before attention. q: None for rows whose outputs are not needed."""
        latent = self._stored(latent, plan)
        scales = self.pool.scales[layer]
        latent_write(latent, q, rotary, plan.kv_slots, self._layers[layer], norm, scales)

    def _stored(self, latent: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The latents that go into the pool."""
        return latent

    @abstractmethod
    def _plan_windows(self, metadata: AttentionMetadata) -> Windows:
        """Tables, slots and mask as in the plan."""

    @abstractmethod
    def _run_windows(
        self, layer: int, q_latent: torch.Tensor, q: torch.Tensor, plan: LatentPlan
    ) -> torch.Tensor:
        """As `latent_attention`."""

    def _plan_contexts(self, metadata: AttentionMetadata) -> list[ExpandedPart]:
        """Adjacent chunks that fit the bound share a part; a request with more keys has several."""
        chunks, row = [], 0
        lens = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
        total, group = 0, 0
        for request, (length, kv_len) in enumerate(lens):
            total += kv_len
            if total > MAX_EXPANDED_TOKENS:
                total, group = kv_len, group + 1
            chunks.append((group, request, slice(row, row + length), kv_len))
            row += length
        parts = []
        for _, members in groupby(chunks, lambda chunk: chunk[0]):
            own = [chunk[1:] for chunk in members]
            if len(own) == 1 and own[0][2] > MAX_EXPANDED_TOKENS:
                parts += self._long_parts(metadata, *own[0])
            else:
                parts.append(self._short_part(metadata, own))
        return parts

    def _short_part(
        self, metadata: AttentionMetadata, chunks: list[tuple[int, slice, int]]
    ) -> ExpandedPart:
        rows = slice(chunks[0][1].start, chunks[-1][1].stop)
        lens = tuple(own.stop - own.start for _, own, _ in chunks)
        key_lens = tuple(kv_len for _, _, kv_len in chunks)
        if lens == key_lens:  # no chunk has earlier tokens
            slots = metadata.kv_slots[rows]
        else:
            slots = torch.cat([self._slots(metadata, request, 0, n) for request, _, n in chunks])
        return ExpandedPart.of(rows, slots, lens, key_lens, is_causal=True)

    def _long_parts(
        self, metadata: AttentionMetadata, request: int, rows: slice, kv_len: int
    ) -> list[ExpandedPart]:
        """The earlier tokens in pieces, which all queries see, then the chunk's own."""
        length, parts = rows.stop - rows.start, []
        for start in range(0, kv_len - length, MAX_EXPANDED_TOKENS):
            end = min(start + MAX_EXPANDED_TOKENS, kv_len - length)
            slots = self._slots(metadata, request, start, end)
            parts.append(ExpandedPart.of(rows, slots, (length,), (end - start,), is_causal=False))
        slots = metadata.kv_slots[rows]
        return [*parts, ExpandedPart.of(rows, slots, (length,), (length,), is_causal=True)]

    def _slots(
        self, metadata: AttentionMetadata, request: int, start: int, end: int
    ) -> torch.Tensor:
        """The pool's slots of the request's tokens `start` to `end`."""
        keys = torch.arange(start, end, device=metadata.kv_slots.device)
        return slots_of(metadata.block_tables[request, None], keys[None], self.pool.page_size)[0]


class VanillaLatent(LatentBackend):
    """Plain torch: the default on a CPU and the reference. Slots beyond a request's length are
    replaced, not only masked: they may belong to another request, whose values may be NaN, and
    zero times NaN is NaN."""

    def _stored(self, latent: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        windows = plan.windows if isinstance(plan, LatentPlan) else None
        if windows is None or windows.rows.window == 1:
            return latent
        # A draft whose latent is NaN would spoil the rows before it, which mask it. Its own row is
        # NaN by its query.
        return latent.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def _plan_windows(self, metadata: AttentionMetadata) -> Windows:
        rows, length = metadata.rows, metadata.max_kv_len
        batch, window = rows.num_requests, rows.window
        device, heads = metadata.kv_slots.device, self.geometry.num_heads
        kv_lens, block_tables = metadata.kv_lens[-batch:], metadata.block_tables[-batch:]
        keys = torch.arange(length, device=device)
        own_keys = torch.minimum(keys, kv_lens[:, None] - 1)
        slots = slots_of(block_tables, own_keys, self.pool.page_size).flatten()
        hidden = hidden_keys(rows, kv_lens, keys, metadata.tree)
        mask = additive_mask(hidden, self.pool.kv_format.dtype)
        mask = mask[:, None, :, None].expand(batch, 1, window, heads, length).flatten(2, 3)
        return LatentTables(rows, block_tables, kv_lens), slots, mask

    def _run_windows(
        self, layer: int, q_latent: torch.Tensor, q: torch.Tensor, plan: LatentPlan
    ) -> torch.Tensor:
        assert plan.windows is not None and plan.slots is not None
        (heads, _, rank), nope, rows = q_latent.shape, self.geometry.nope_dim, plan.windows.rows
        queries = rows.padded(torch.cat((q_latent.transpose(0, 1), q[..., nope:]), -1))
        entries = self._layers[layer].flatten(0, 1).index_select(0, plan.slots)
        entries, scale = entries.to(q.dtype), self.pool.scales[layer].key
        entries = entries.view(rows.num_requests, 1, -1, entries.shape[-1])
        mixed = F.scaled_dot_product_attention(
            queries.flatten(1, 2).unsqueeze(1),
            entries,
            entries[..., :rank],
            plan.mask,
            scale=self.geometry.scale * scale,
        )
        mixed = times(mixed.view(rows.num_requests, rows.window, heads, rank), scale)
        return rows.flat(mixed).transpose(0, 1)


class TritonLatent(LatentBackend):
    """Windows run a kernel that reads lengths and block tables from the device. A plan without
    context chunks depends on no length, so a CUDA graph can hold its forward."""

    supports_graphs = True

    def _plan_windows(self, metadata: AttentionMetadata) -> Windows:
        batch = metadata.rows.num_requests
        tables = LatentTables(
            metadata.rows, metadata.block_tables[-batch:], metadata.kv_lens[-batch:], metadata.tree
        )
        return tables, None, None

    def _run_windows(
        self, layer: int, q_latent: torch.Tensor, q: torch.Tensor, plan: LatentPlan
    ) -> torch.Tensor:
        assert plan.windows is not None
        own = self._layers[layer], plan.windows, self.geometry.scale, self._workspace
        return latent_attention(q_latent, q, *own, self.pool.scales[layer])
