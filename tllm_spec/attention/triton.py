"""TRITON: generation windows run a kernel that reads lengths and block tables from the device;
context chunks run as in VANILLA, over FP8 codes and with sinks in the batch-invariant kernel, and
with wide heads in a kernel of their own.
Without Triton the kernels' plain-torch references run.

A plan without context chunks depends on no length, so a CUDA graph can hold its forward. Before a
capture, a forward of the same shape must have run: kernels are compiled at their first launch."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan, HeadsInputs
from tllm_spec.attention.vanilla import VanillaAttention, VanillaPlan
from tllm_spec.kernels.attention.batch_invariant_attention import (
    QueryTiles,
    batch_invariant_attention,
    tokens_per_tile,
)
from tllm_spec.kernels.attention.prompt_attention import prompt_attention, prompt_tokens_per_tile
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.attention.visible_keys import KeySpans
from tllm_spec.kernels.attention.window_attention import WindowCall, WindowTables, window_attention
from tllm_spec.kernels.attention.window_splits import MAX_PARTIAL_ROWS, WindowWorkspace
from tllm_spec.kernels.slots.round_rows import RoundRows

MAX_SDPA_DIM = 256  # torch has fused kernels for heads up to this size


@dataclass(frozen=True)
class TritonPlan(VanillaPlan):
    """VANILLA's chunks, and `windows` instead of its generation plan."""

    windows: WindowTables | None
    """Tensors are views of the metadata."""
    tiled_chunks: tuple[torch.Tensor, QueryTiles] | None
    """Instead of VANILLA's chunks, if the pool has codes, or heads have sinks or are wide: the
    pages of all requests, `[C + B, P]` int32, and the tiles of all chunks."""
    prefill: Any = None
    """FLASHINFER's plan of at least one chunk, instead of both."""
    page_list: tuple[torch.Tensor, torch.Tensor | None] | None = None
    """FLASHINFER's pages of the chunks and their count, as in `WidePages.fill`, if the pool has
    codes."""


class TritonAttention(VanillaAttention):
    """As in VANILLA, a request's result depends on its own tokens only."""

    supports_graphs = True

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(geometry, pool)
        self._layers = pool.data.unbind(0)
        self._has_wide_tiles = geometry.head_dim > MAX_SDPA_DIM and not geometry.has_sinks
        self._workspace = WindowWorkspace.allocate(geometry.head_dim, pool.data.device)

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry, kv_format: KVFormat) -> int:
        return MAX_PARTIAL_ROWS * (geometry.head_dim + 1) * torch.float32.itemsize

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        windows = self._plan_windows(metadata)
        is_tiled = self.pool.kv_format.scales is not None or self.geometry.has_sinks
        is_tiled |= self._has_wide_tiles
        if metadata.context_lens and is_tiled:
            lens, size = metadata.context_lens, tokens_per_tile(self._group)
            if self._has_wide_tiles:
                q = self.pool.data.new_empty(0, dtype=self.pool.kv_format.dtype)
                size = prompt_tokens_per_tile(q, self.geometry.head_dim, self._group)
            tiles = QueryTiles.of_chunks(
                lens, metadata.context_kv_lens, size, metadata.kv_slots.device
            )
            chunks = metadata.block_tables, QueryTiles.joined(tiles)
            return TritonPlan(metadata.kv_slots, sum(lens), (), None, windows, chunks)
        own = super().plan(replace(metadata, rows=RoundRows.rectangle(0, 1)))
        return TritonPlan(metadata.kv_slots, own.first, own.contexts, None, windows, None)

    def run(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, TritonPlan)
        first, (qkv, norm, sinks) = plan.first, inputs
        if first or plan.windows is None:
            rows = HeadsInputs(qkv[:first], norm)
            self.write(layer, rows, rotary.first(first), AttentionPlan(plan.kv_slots[:first]))
        if self.writes(qkv):
            q, kv = self.split(qkv)
        else:
            q, kv = qkv, self.stored(layer, plan.kv_slots[:first], qkv.dtype)
        outputs = [self._run_context(layer, q, kv, context, sinks) for context in plan.contexts]
        if plan.tiled_chunks is not None:
            outputs.append(self._run_tiles(layer, q[:first], plan.tiled_chunks, sinks))
        if plan.windows is not None:
            outputs.append(self._run_windows(layer, inputs, rotary, plan))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run_tiles(
        self,
        layer: int,
        q: torch.Tensor,
        chunks: tuple[torch.Tensor, QueryTiles],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        geometry, scales = self.geometry, self.pool.scales[layer]
        own = q, self._layers[layer], *chunks, geometry.scale
        if self._has_wide_tiles:
            return prompt_attention(*own, geometry.span, scales)
        return batch_invariant_attention(*own, None, geometry.span, scales, sinks)

    def _plan_windows(self, metadata: AttentionMetadata) -> WindowTables | None:
        batch = metadata.rows.num_requests
        if not batch:
            return None
        first, tree = sum(metadata.context_lens), metadata.tree
        spans = None
        if self.geometry.span is not None:
            spans = KeySpans(self.geometry.span, metadata.positions[first:])
            tree = tree and spans.cut(tree)
        return WindowTables(
            metadata.rows,
            metadata.block_tables[-batch:],
            metadata.kv_lens[-batch:],
            metadata.kv_slots[first:],
            metadata.num_padding,
            tree,
            spans,
        )

    def _run_windows(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: TritonPlan
    ) -> torch.Tensor:
        first, windows, (qkv, norm, sinks) = plan.first, plan.windows, inputs
        assert windows is not None
        own = qkv[first:], rotary.cos_sin[first:], self._layers[layer], windows
        options = norm, self.pool.scales[layer], sinks, self.writes(qkv)
        call = WindowCall(*own, self.geometry.scale, self._workspace, *options)
        return window_attention(call)
