"""FLASHINFER for MLA, by name only: generation windows of chains run FlashInfer's MLA kernels,
which are planned from lengths on the host. So each forward waits for the device, and CUDA graphs
cannot hold it. Draft trees and context chunks run as in TRITON."""

from dataclasses import dataclass

import torch

from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.latent import LatentWindows, TritonLatent
from tllm_spec.kernels.attention.planned_latent import (
    DTYPES,
    LATENT_DIM,
    PLAN_BYTES,
    ROPE_DIM,
    WORKSPACE_BYTES,
    LatentRows,
    PlannedLatent,
)


@dataclass(frozen=True)
class PlannedWindows(LatentWindows):
    """Windows that the wrapper is planned for, until the next plan."""


class FlashInferLatent(TritonLatent):
    """Raises what `PlannedLatent` raises if its kernels cannot be used. `planned` replaces it in
    tests."""

    supports_graphs = False

    def __init__(
        self, geometry: LatentGeometry, pool: KVPool, planned: PlannedLatent | None = None
    ) -> None:
        super().__init__(geometry, pool)
        self._planned = planned or PlannedLatent(
            self._layers[0], geometry.num_heads, geometry.latent_dim, geometry.scale
        )

    @classmethod
    def workspace_bytes(cls, geometry: LatentGeometry, dtype: torch.dtype) -> int:
        return super().workspace_bytes(geometry, dtype) + WORKSPACE_BYTES + PLAN_BYTES

    @staticmethod
    def why_not(geometry: LatentGeometry, kv_format: KVFormat) -> str | None:
        """Why FlashInfer has no kernels for this attention; None: it has."""
        if kv_format.scales is not None:
            return "its MLA kernels read no FP8 KV cache"
        dims = geometry.latent_dim, geometry.rope_dim
        if dims == (LATENT_DIM, ROPE_DIM) and kv_format.dtype in DTYPES:
            return None
        name = str(kv_format.dtype).removeprefix("torch.")
        return (
            f"FlashInfer has MLA kernels of {LATENT_DIM} + {ROPE_DIM} elements in bfloat16 and "
            f"float16, and the model has {dims[0]} + {dims[1]} in {name}"
        )

    def _plan_windows(self, metadata: AttentionMetadata) -> LatentWindows:
        windows = super()._plan_windows(metadata)
        if metadata.tree is not None:
            return windows
        tables = windows.tables
        self._planned.plan(
            LatentRows.of_windows(
                tables.kv_lens, tables.rows, tables.block_tables, self.pool.page_size
            )
        )
        return PlannedWindows(windows.first, tables, None, None)

    def _run_windows(
        self, layer: int, q_latent: torch.Tensor, q: torch.Tensor, plan: LatentWindows
    ) -> torch.Tensor:
        if not isinstance(plan, PlannedWindows):
            return super()._run_windows(layer, q_latent, q, plan)
        rotated = q[..., self.geometry.nope_dim :]
        mixed = self._planned.run(q_latent.transpose(0, 1), rotated, self._layers[layer])
        return mixed.transpose(0, 1)
