"""VANILLA: paged attention in plain torch on any device. The default on a CPU and the reference of
the other backends.

Generation windows take three ops a layer: one index_copy_ writes K and V of all rows, one
index_select gathers K and V of all requests, and one scaled_dot_product_attention has the query
heads of a group folded into the query axis, so that K and V are not repeated. Context chunks run
one after another. With a span each is cut, so that its rows see few other keys.

The last bits of a sum depend on the longest context of the batch. On a CPU they are float64's where
the output is quantised to FP8, so that no code depends on other requests, or on drafts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tllm_spec.attention.geometry import AttentionGeometry, KVPool
from tllm_spec.attention.interface import (
    AttentionMetadata,
    AttentionPlan,
    HeadsBackend,
    HeadsInputs,
    additive_mask,
    slots_of,
)
from tllm_spec.kernels.attention.kv_codes import movable, times
from tllm_spec.kernels.attention.rotary_write import (
    Rotary,
    plain_norm_values,
    plain_rotate,
    plain_write_kv,
)
from tllm_spec.kernels.attention.visible_keys import KeySpans, hidden_keys
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass(frozen=True)
class ContextPlan:
    """One context chunk of n rows, or n of its rows. Without `kv_rows` they are the first that see
    their keys, and attend to themselves only."""

    rows: slice
    kv_rows: torch.Tensor | None = None
    """[2 * L] row indices into the flat layer: the keys that the rows see, then their values."""
    mask: torch.Tensor | None = None
    """[n, L], added to the scores."""


@dataclass(frozen=True)
class GenerationPlan:
    """All generation windows."""

    rows: RoundRows
    kv_rows: torch.Tensor
    """[2 * B * L] row indices into the flat layer: all keys, then all values."""
    gathered: torch.Tensor
    """[2 * B * L, Hkv * D]: the rows at `kv_rows`, as stored; every layer overwrites it."""
    widened: torch.Tensor
    """`gathered` in the model's type: a tensor of its own for codes."""
    keys: torch.Tensor
    """[B, Hkv, L, D], a view of `widened`."""
    values: torch.Tensor
    """[B, Hkv, L, D], a view of `widened`."""
    mask: torch.Tensor
    """[B, 1, W * G, L], added to the scores."""


@dataclass(frozen=True)
class VanillaPlan(AttentionPlan):
    """The chunks, then the windows, if there are any, from row `first` on."""

    first: int
    contexts: tuple[ContextPlan, ...]
    generation: GenerationPlan | None


class VanillaAttention(HeadsBackend):
    """A request's result depends on its own tokens only. Slots beyond its length are replaced, not
    only masked: they may belong to another request, whose values may be NaN, and zero times NaN is
    NaN."""

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(geometry, pool)
        heads, head_dim = geometry.num_kv_heads, geometry.head_dim
        self._num_slots = pool.num_pages * pool.page_size
        self._rows = [layer.view(2 * self._num_slots, heads * head_dim) for layer in pool.data]
        self._group = geometry.num_heads // heads
        is_wide = geometry.feeds_codes and pool.data.device.type == "cpu"
        self._attend = _attend_wide if is_wide else F.scaled_dot_product_attention

    def plan(self, metadata: AttentionMetadata) -> VanillaPlan:
        contexts: list[ContextPlan] = []
        row = 0
        for request, length in enumerate(metadata.context_lens):
            contexts += self._plan_contexts(metadata, request, slice(row, row + length))
            row += length
        generation = self._plan_generation(metadata, row) if metadata.rows.num_requests else None
        return VanillaPlan(metadata.kv_slots, row, tuple(contexts), generation)

    def run(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, VanillaPlan)
        qkv, norm, sinks = inputs
        if self.writes(qkv):
            q, kv = self._write_rows(layer, inputs, rotary, plan)
        else:
            plain_rotate(qkv, rotary, norm)
            q, kv = qkv, self.stored(layer, plan.kv_slots, qkv.dtype)
        outputs = [self._run_context(layer, q, kv, context, sinks) for context in plan.contexts]
        if plan.generation is not None:
            outputs.append(self._run_generation(layer, q[plan.first :], plan.generation, sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def stored(self, layer: int, kv_slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the pool has in slots `[T]`, as numbers, `[T, 2, Hkv, D]`."""
        pages = movable(self.pool.data[layer]).flatten(1, 2)
        found = pages.index_select(1, kv_slots).view(self.pool.data.dtype)
        return found.to(dtype).transpose(0, 1)

    def _write_rows(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: VanillaPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, and what the pool then has, as `stored`."""
        qkv, norm, _ = inputs
        plain_rotate(qkv[:, : -self.geometry.num_kv_heads], rotary, norm)
        if norm is not None and norm.norms_values:
            plain_norm_values(qkv[:, -self.geometry.num_kv_heads :], norm)
        q, kv = self.split(qkv)
        if plan.generation is not None and plan.generation.rows.window > 1:
            # A masked key counts zero times, and zero times NaN is NaN: a draft whose keys and
            # values are NaN would spoil the rows before it. Its own row is NaN by its query.
            kv[plan.first :].nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        scales = self.pool.scales[layer]
        stored = plain_write_kv(kv, plan.kv_slots, self.pool.data[layer], scales)
        return q, stored.to(q.dtype).transpose(0, 1)

    def _plan_contexts(
        self, metadata: AttentionMetadata, request: int, rows: slice
    ) -> Iterator[ContextPlan]:
        """The plans of a chunk's rows, each with the keys that its rows see."""
        kv_len, span = metadata.context_kv_lens[request], self.geometry.span
        size, offset = span.size if span else kv_len, rows.stop - kv_len
        position = rows.start - offset
        while position < kv_len:
            end = min((position // size + 1) * size, kv_len)
            first_key = span.first_key(position) if span else 0
            kv_rows = mask = None
            if first_key < position:
                keys = torch.arange(first_key, end, device=metadata.kv_slots.device)
                queries = keys[position - first_key :]
                hidden = keys > queries[:, None]
                if span is not None:
                    hidden |= keys < KeySpans(span, queries).first_keys()[:, None]
                kv_rows = self._kv_rows(metadata.block_tables[request, None], keys[None])
                mask = additive_mask(hidden, self.pool.kv_format.dtype)
            yield ContextPlan(slice(position + offset, end + offset), kv_rows, mask)
            position = end

    def _plan_generation(self, metadata: AttentionMetadata, first: int) -> GenerationPlan:
        rows, length = metadata.rows, metadata.max_kv_len
        batch, window = rows.num_requests, rows.window
        heads, head_dim, group = self.geometry.num_kv_heads, self.geometry.head_dim, self._group
        device = metadata.kv_slots.device
        keys = torch.arange(length, device=device)
        kv_lens = metadata.kv_lens[-batch:, None]
        own_keys, spans, tree = torch.minimum(keys, kv_lens - 1), None, metadata.tree
        if self.geometry.span is not None:
            spans = KeySpans(self.geometry.span, metadata.positions[first:])
            first_keys = rows.padded(spans.first_keys())
            # Keys before these may have no page any more.
            own_keys = torch.maximum(own_keys, first_keys.amin(1, keepdim=True))
            tree = tree and spans.cut(tree)
        kv_rows = self._kv_rows(metadata.block_tables[-batch:], own_keys)
        gathered = widened = self.pool.data.new_empty(2 * batch * length, heads * head_dim)
        dtype = self.pool.kv_format.dtype
        if dtype != gathered.dtype:
            widened = torch.empty_like(gathered, dtype=dtype)
        cached = widened.view(2, batch, length, heads, head_dim).transpose(2, 3)
        hidden = hidden_keys(rows, kv_lens[:, 0], keys, tree)
        if spans is not None:
            hidden |= keys < first_keys[:, :, None]
        mask = additive_mask(hidden, dtype)[:, None, :, None]
        mask = mask.expand(batch, 1, window, group, length).reshape(
            batch, 1, window * group, length
        )
        return GenerationPlan(rows, kv_rows, gathered, widened, cached[0], cached[1], mask)

    def _kv_rows(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Row indices into the flat layer: the keys at positions `[N, L]` of requests with pages
        `[N, P]`, then their values."""
        keys = slots_of(block_tables, positions, self.pool.page_size).flatten()
        return torch.cat((keys, keys + self._num_slots))

    def _run_context(
        self,
        layer: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        plan: ContextPlan,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        q = q[plan.rows].transpose(0, 1)[None]
        if plan.kv_rows is None:
            kv = kv[plan.rows].transpose(0, 1)
        else:
            kv = self._rows[layer].index_select(0, plan.kv_rows).view(2, -1, *kv.shape[2:])
            kv = kv.to(q.dtype)
        scales = self.pool.scales[layer]
        keys, values = kv.transpose(1, 2)[:, None].unbind(0)
        scale, is_causal = self.geometry.scale * scales.key, plan.mask is None
        if sinks is None:
            output = self._attend(
                q, keys, values, plan.mask, is_causal=is_causal, scale=scale, enable_gqa=True
            )
        else:
            mask, rows = plan.mask, q.shape[2]
            if mask is None:
                mask = torch.full((rows, rows), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
            by_head = q.view(1, -1, self._group, *q.shape[2:])
            parts = by_head, keys.unsqueeze(2), values.unsqueeze(2), mask, scale
            output = _attend_with_sinks(*parts, sinks.view(-1, self._group, 1, 1)).flatten(1, 2)
        return times(output[0].transpose(0, 1).flatten(1), scales.value)

    def _run_generation(
        self, layer: int, q: torch.Tensor, plan: GenerationPlan, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, _, head_dim = plan.keys.shape
        window, group = plan.rows.window, self._group
        torch.index_select(self._rows[layer], 0, plan.kv_rows, out=plan.gathered)
        if plan.widened is not plan.gathered:
            plan.widened.copy_(plan.gathered)
        scales = self.pool.scales[layer]
        if window == 1:
            q = q.view(batch, heads, group, head_dim)
        else:
            q = plan.rows.padded(q).view(batch, window, heads, group, head_dim)
            q = q.transpose(1, 2).flatten(2, 3)
        scale = self.geometry.scale * scales.key
        if sinks is None:
            output = self._attend(q, plan.keys, plan.values, plan.mask, scale=scale)
        else:
            by_row = sinks.view(heads, 1, group).expand(-1, window, -1).reshape(heads, -1, 1)
            output = _attend_with_sinks(q, plan.keys, plan.values, plan.mask, scale, by_row)
        if window > 1:
            output = output.view(batch, heads, window, group, head_dim).transpose(1, 2)
            output = plan.rows.flat(output)
        return times(output.reshape(plan.rows.num_rows, -1), scales.value)


def _attend_wide(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    wide = q.double(), keys.double(), values.double(), None if mask is None else mask.double()
    return F.scaled_dot_product_attention(*wide, **options).to(q.dtype)


def _attend_with_sinks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """As `F.scaled_dot_product_attention`, `[..., R, D]`, with one more score for each row. sinks:
    float32; it can be expanded to `[..., R, 1]`."""
    scores = (q @ keys.mT).float() * scale + mask
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :-1].to(values.dtype) @ values
