"""VANILLA: paged attention in plain torch, on any device. The CPU's default and the oracle of all kernels.

A generation window costs five ops a layer: one index_copy_ writes K and V of all rows, one index_select gathers K and V of
all requests, and one scaled_dot_product_attention runs with the query heads of a group folded into the query axis, so that
K and V need no repeating. Context chunks run one request after another.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionGeometry,
    AttentionMetadata,
    AttentionPlan,
)
from tllm_spec.attention.kv_pool import KVPool


@dataclass(frozen=True)
class ContextPlan:
    """One context chunk. Without `kv_rows` nothing is cached and the chunk attends to itself."""

    first: int
    end: int
    kv_rows: torch.Tensor | None = None
    """[2 * L] rows of the flat layer: the request's keys, then its values."""
    mask: torch.Tensor | None = None
    """[n, L] added to the scores."""


@dataclass(frozen=True)
class GenerationPlan:
    """All generation windows."""

    first: int
    kv_rows: torch.Tensor
    """[2 * B * L] rows of the flat layer: all keys, then all values."""
    mask: torch.Tensor
    """[B, 1, W * G, L] added to the scores."""
    q_shape: tuple[int, int, int, int, int]
    gathered: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class VanillaPlan(AttentionPlan):
    """`kv_slots`: [T]; then the chunks, then the windows if there are any."""

    kv_slots: torch.Tensor
    contexts: tuple[ContextPlan, ...]
    generation: GenerationPlan | None


class VanillaAttention(AttentionBackend):
    """Numbers depend on the request's own pages only: what lies beyond its length is replaced, not just masked, because a
    page may come from a request that died of NaN, and a NaN value times the weight zero is NaN.
    """

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(geometry, pool)
        num_slots = pool.num_pages * pool.page_size
        heads, head_dim = geometry.num_kv_heads, geometry.head_dim
        self._num_slots = num_slots
        self._slots = [layer.view(2, num_slots, heads, head_dim) for layer in pool.data]
        self._rows = [layer.view(2 * num_slots, heads * head_dim) for layer in pool.data]
        self._group = geometry.num_heads // heads

    def plan(self, metadata: AttentionMetadata) -> VanillaPlan:
        contexts, row = [], 0
        lengths = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
        for request, (length, kv_len) in enumerate(lengths):
            contexts.append(self._plan_context(metadata, request, row, length, kv_len))
            row += length
        generation = self._plan_generation(metadata, row) if metadata.num_generations else None
        return VanillaPlan(metadata.kv_slots, tuple(contexts), generation)

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        assert isinstance(plan, VanillaPlan)
        self._slots[layer].index_copy_(1, plan.kv_slots, kv.transpose(0, 1))
        outputs = [self._run_context(layer, q, kv, context) for context in plan.contexts]
        if plan.generation is not None:
            outputs.append(self._run_generation(layer, q, plan.generation))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan_context(
        self, metadata: AttentionMetadata, request: int, row: int, length: int, kv_len: int
    ) -> ContextPlan:
        if length == kv_len:
            return ContextPlan(row, row + length)
        device, page_size = metadata.kv_slots.device, self.pool.page_size
        pages = metadata.block_tables[request, : -(-kv_len // page_size), None]
        slots = (pages * page_size + torch.arange(page_size, device=device)).view(-1)[:kv_len]
        hidden = torch.ones(length, kv_len, dtype=torch.bool, device=device).triu_(kv_len - length + 1)
        return ContextPlan(row, row + length, self._kv_rows(slots), self._additive(hidden))

    def _plan_generation(self, metadata: AttentionMetadata, row: int) -> GenerationPlan:
        batch, window, length = metadata.num_generations, metadata.window, metadata.max_kv_len
        first, device, page_size = len(metadata.context_lens), metadata.kv_slots.device, self.pool.page_size
        keys = torch.arange(length, device=device)
        lengths = metadata.kv_lens[first:, None]
        own_keys = torch.minimum(keys, lengths - 1)
        pages = metadata.block_tables[first:].gather(1, own_keys // page_size)
        slots = pages * page_size + own_keys % page_size
        visible = lengths - torch.arange(window - 1, -1, -1, device=device)
        mask = self._additive(keys >= visible[:, :, None])
        mask = mask[:, None, :, None].expand(batch, 1, window, self._group, length)
        mask = mask.reshape(batch, 1, window * self._group, length)
        g = self.geometry
        gathered = torch.empty(2 * batch * length, g.num_kv_heads * g.head_dim, dtype=self.pool.data.dtype)
        keys_, values_ = gathered.view(2, batch, length, g.num_kv_heads, g.head_dim).transpose(2, 3).unbind(0)
        return GenerationPlan(row, self._kv_rows(slots.view(-1)), mask, (batch, window, g.num_kv_heads, self._group, g.head_dim), gathered, keys_, values_)

    def _kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.cat((slots, slots + self._num_slots))

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.pool.data.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _run_context(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        q = q[plan.first : plan.end]
        if plan.kv_rows is None:
            kv = kv[plan.first : plan.end].transpose(0, 1)
        else:
            kv = self._rows[layer].index_select(0, plan.kv_rows).view(2, -1, *kv.shape[2:])
        keys, values = kv.transpose(1, 2)[:, None].unbind(0)
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=plan.mask,
            is_causal=plan.mask is None,
            scale=self.geometry.scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1).reshape(q.shape[0], -1)

    def _run_generation(self, layer: int, q: torch.Tensor, plan: GenerationPlan) -> torch.Tensor:
        batch, window, heads, group, head_dim = plan.q_shape
        torch.index_select(self._rows[layer], 0, plan.kv_rows, out=plan.gathered)
        if plan.first:
            q = q[plan.first :]
        if window == 1:
            q = q.view(batch, heads, group, head_dim)
        else:
            q = q.view(plan.q_shape).transpose(1, 2).reshape(batch, heads, window * group, head_dim)
        output = F.scaled_dot_product_attention(
            q, plan.keys, plan.values, plan.mask, scale=self.geometry.scale
        )
        if window > 1:
            output = output.view(batch, heads, window, group, head_dim).transpose(1, 2)
        return output.reshape(batch * window, -1)
