"""Attention for `deterministic: true`: a token's result has the same bits in every batch, chunk and
window.

Prompts and windows run in one launch of one kernel
(`kernels/attention/batch_invariant_attention.py`), draft trees in another one. The plan of a batch
without prompts depends on no length, so a CUDA graph can hold its forward."""

from dataclasses import dataclass

import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVPool
from tllm_spec.attention.indexed import chosen_rows
from tllm_spec.attention.interface import (
    AttentionMetadata,
    AttentionPlan,
    HeadsBackend,
    HeadsInputs,
)
from tllm_spec.attention.latent import MAX_CHOSEN_KEYS, LatentInputs, TritonLatent
from tllm_spec.kernels.attention.batch_invariant_attention import (
    MAX_PARTIAL_ROWS,
    QueryTiles,
    batch_invariant_attention,
    tokens_per_tile,
)
from tllm_spec.kernels.attention.batch_invariant_latent import (
    TREE_TOKENS,
    batch_invariant_latent,
    latent_tokens_per_tile,
)
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.gemm.head_gemm import head_gemm
from tllm_spec.kernels.slots.round_rows import RoundRows


@dataclass(frozen=True)
class BatchInvariantPlan(AttentionPlan):
    """All rows of the forward, in tiles."""

    block_tables: torch.Tensor
    """[C + B, P] int32."""
    launches: tuple[tuple[slice, QueryTiles], ...]
    """The rows of each launch, and their tiles."""


class BatchInvariantAttention(HeadsBackend):
    """Batch-invariant on CUDA in float32, bfloat16 and float16. On other devices the kernels'
    references run, which are not."""

    supports_graphs = True

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(geometry, pool)
        self._layers = pool.data.unbind(0)
        self._tile_tokens = tokens_per_tile(geometry.num_heads // geometry.num_kv_heads)
        self._results = WindowWorkspace.allocate(
            geometry.head_dim, pool.data.device, MAX_PARTIAL_ROWS
        )

    def plan(self, metadata: AttentionMetadata) -> BatchInvariantPlan:
        size, row = self._tile_tokens, sum(metadata.context_lens)
        lengths = metadata.context_lens, metadata.context_kv_lens
        parts = QueryTiles.of_chunks(*lengths, size, metadata.kv_slots.device)
        first = len(parts)
        trees, num_rows = None, len(metadata.kv_slots)
        if batch := metadata.rows.num_requests:
            kv_lens = metadata.kv_lens[-batch:]
            if metadata.tree is not None:
                trees = QueryTiles.of_trees(kv_lens, metadata.tree, first, size)
            else:
                parts.append(QueryTiles.of_windows(row, kv_lens, metadata.rows, first, size))
        launches = []
        if parts:
            end = row if trees is not None else num_rows
            launches.append((slice(0, end), QueryTiles.joined(parts)))
        if trees is not None:
            launches.append((slice(row, num_rows), trees))
        return BatchInvariantPlan(metadata.kv_slots, metadata.block_tables, tuple(launches))

    def run(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, BatchInvariantPlan)
        self.write(layer, inputs, rotary, plan)
        q = inputs.qkv[:, : self.geometry.num_heads]
        outputs = [
            batch_invariant_attention(
                q[rows],
                self._layers[layer],
                plan.block_tables,
                tiles,
                self.geometry.scale,
                self._results,
                self.geometry.span,
                self.pool.scales[layer],
                inputs.sinks,
            )
            for rows, tiles in plan.launches
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


# MLA attention for `deterministic: true`: prompts and windows run in the absorbed form in one
# kernel (`kernels/attention/batch_invariant_latent.py`), so that a token's result has the same
# bits in every batch, chunk, window and tree.


# Rows of a prompt that are in the absorbed form at a time: a row has R elements for each head.
MAX_ABSORBED_TOKENS = 1024


class BatchInvariantLatent(TritonLatent):
    """Batch-invariant on CUDA. On other devices the kernels' references run, which are not."""

    def plan(self, metadata: AttentionMetadata) -> BatchInvariantPlan:
        size, row, launches = latent_tokens_per_tile(self.geometry.num_heads), 0, []
        device, first = metadata.kv_slots.device, len(metadata.context_lens)
        lengths = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
        chosen = chosen_rows(metadata, self.geometry.topk)
        for request, (length, kv_len) in enumerate(lengths):
            for offset in range(0, length, MAX_ABSORBED_TOKENS):
                count = min(length - offset, MAX_ABSORBED_TOKENS)
                start = kv_len - length + offset
                tiles = QueryTiles.of_chunk(0, start, count, request, size, device)
                launches.append((slice(row + offset, row + offset + count), tiles))
            row += length
        if batch := metadata.rows.num_requests:
            kv_lens, tree = metadata.kv_lens[-batch:], metadata.tree
            if tree is None:
                tiles = QueryTiles.of_windows(0, kv_lens, metadata.rows, first, size)
            else:
                tiles = QueryTiles.of_trees(kv_lens, tree, first, TREE_TOKENS)
            launches.append((slice(row, len(metadata.kv_slots)), tiles))
        launches = [own for own in launches if not chosen.start <= own[0].start < chosen.stop]
        return BatchInvariantPlan(metadata.kv_slots, metadata.block_tables, tuple(launches))

    def run(
        self, layer: int, inputs: LatentInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, BatchInvariantPlan)
        self.write(layer, inputs.latent, inputs.norm, rotary, plan, inputs.q)
        geometry, q, entries = self.geometry, inputs.q, self._layers[layer]
        keys, values = inputs.up.split_with_sizes((geometry.nope_dim, geometry.value_dim), 1)
        output = q.new_empty(len(q), geometry.num_heads, geometry.value_dim)
        launches = [(rows, entries, plan.block_tables, tiles) for rows, tiles in plan.launches]
        # Chosen slots are pages of one token. All keys are read in the same order as without.
        entries = entries.flatten(0, 1).unsqueeze(1)
        for own in () if inputs.chosen is None else inputs.chosen.parts(MAX_CHOSEN_KEYS):
            windows = RoundRows.rectangle(len(own.counts), 1)
            tiles = QueryTiles.of_windows(0, own.counts, windows, 0, 1)
            launches.append((own.rows, entries, own.slots, tiles))
        for rows, pages, tables, tiles in launches:
            queries = q[rows]
            absorbed = q.new_empty(*queries.shape[:2], geometry.latent_dim)
            head_gemm(queries[..., : geometry.nope_dim], keys, absorbed, batch_invariant=True)
            if inputs.adapters is not None:
                inputs.adapters.queries(queries[..., : geometry.nope_dim], rows, absorbed)
            own_scales = geometry.scale, self._workspace, self.pool.scales[layer]
            mixed = batch_invariant_latent(absorbed, queries, pages, tables, tiles, *own_scales)
            head_gemm(mixed, values.mT, output[rows], batch_invariant=True)
            if inputs.adapters is not None:
                inputs.adapters.values(mixed, rows, output[rows])
        return output.flatten(1)
