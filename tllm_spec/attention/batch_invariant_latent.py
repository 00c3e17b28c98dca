"""MLA attention for `deterministic: true`: prompts and windows run in the absorbed form in one
kernel (`kernels/attention/batch_invariant_latent.py`), so that a token's result has the same bits
in every batch, chunk, window and tree."""

from dataclasses import dataclass

import torch

from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan
from tllm_spec.attention.latent import LatentInputs, LatentPlan, TritonLatent
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles, SplitResults
from tllm_spec.kernels.attention.batch_invariant_latent import (
    TREE_TOKENS,
    batch_invariant_latent,
    latent_tokens_per_tile,
)
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.gemm.head_gemm import head_gemm

# Rows of a prompt that are in the absorbed form at a time: a row has R elements for each head.
MAX_ABSORBED_TOKENS = 1024


@dataclass(frozen=True)
class BatchInvariantLatentPlan(LatentPlan):
    """Without parts and windows: all rows are in tiles."""

    block_tables: torch.Tensor
    """[C + B, P] int32."""
    launches: tuple[tuple[slice, QueryTiles], ...]
    """The rows of each launch, and their tiles."""


class BatchInvariantLatent(TritonLatent):
    """Batch-invariant on CUDA. On other devices the kernels' references run, which are not."""

    def plan(self, metadata: AttentionMetadata) -> BatchInvariantLatentPlan:
        size, row, launches = latent_tokens_per_tile(self.geometry.num_heads), 0, []
        device, first = metadata.kv_slots.device, len(metadata.context_lens)
        lengths = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
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
        return BatchInvariantLatentPlan(
            metadata.kv_slots, (), None, metadata.block_tables, tuple(launches)
        )

    def run(
        self, layer: int, inputs: LatentInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, BatchInvariantLatentPlan)
        self.write(layer, inputs.latent, inputs.norm, rotary, plan, inputs.q)
        geometry, q = self.geometry, inputs.q
        keys, values = inputs.up.split_with_sizes((geometry.nope_dim, geometry.value_dim), 1)
        output = q.new_empty(len(q), geometry.num_heads, geometry.value_dim)
        results = SplitResults(self._workspace.outputs, self._workspace.log_sums)
        for rows, tiles in plan.launches:
            own = q[rows]
            absorbed = q.new_empty(*own.shape[:2], geometry.latent_dim)
            head_gemm(own[..., : geometry.nope_dim], keys, absorbed, batch_invariant=True)
            mixed = batch_invariant_latent(
                *(absorbed, own, self._layers[layer], plan.block_tables, tiles),
                *(geometry.scale, results, self.pool.kv_format.scales_of(layer)),
            )
            head_gemm(mixed, values.mT, output[rows], batch_invariant=True)
        return output.flatten(1)
