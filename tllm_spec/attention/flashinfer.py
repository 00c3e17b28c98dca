"""FLASHINFER: context chunks run FlashInfer's paged prefill, generation windows run as in TRITON.

A forward without chunks is the same as TRITON's, in CUDA graphs too. Context chunks are planned
once per forward from lengths on the host; page numbers stay on the device. On Hopper, CUDA graphs
of context chunks share a plan that is updated in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan, ContextPlans
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.triton import TritonAttention, TritonPlan
from tllm_spec.kernels.paged_prefill import (
    NUM_PLANS,
    PLAN_BYTES,
    PagedPrefill,
    PrefillLimits,
    PrefillRows,
)
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary, rotary_write

HEAD_DIMS = (64, 128, 256)  # that FlashInfer has kernels for
DTYPES = (torch.bfloat16, torch.float16)


class Prefill(Protocol):
    """`PagedPrefill`, or its reference implementation in tests."""

    def plan(self, rows: PrefillRows) -> Any: ...
    def run(self, plan: Any, q: torch.Tensor, layer: torch.Tensor, out: torch.Tensor) -> None: ...
    def in_place(self, limits: PrefillLimits) -> "InPlace | None": ...


class InPlace(Protocol):
    """`PrefillInPlace`, or its reference implementation in tests."""

    def plan(self, rows: PrefillRows) -> Any: ...


@dataclass(frozen=True)
class FlashInferPlan(TritonPlan):
    """At least one chunk, in the first `num_rows` rows. They replace TRITON's chunks."""

    num_rows: int
    prefill: Any


class FlashInferContexts(ContextPlans):
    """A fixed number of chunks; their plan is updated in place."""

    def __init__(self, prefill: InPlace, limits: PrefillLimits, page_size: int) -> None:
        self._prefill, self._limits, self._page_size = prefill, limits, page_size
        self._plan: Any = None

    def update(self, lens: Sequence[int], kv_lens: Sequence[int], pages: torch.Tensor) -> None:
        assert len(lens) == self._limits.num_chunks
        self._plan = self._prefill.plan(PrefillRows.of_pages(lens, kv_lens, pages, self._page_size))

    def for_graph(self, kv_slots: torch.Tensor) -> FlashInferPlan:
        assert self._plan is not None
        return FlashInferPlan(kv_slots, (), None, None, None, len(kv_slots), self._plan)


class FlashInferAttention(TritonAttention):
    """Raises what `PagedPrefill` raises if its kernels cannot be used. `prefill` replaces it in
    tests."""

    def __init__(
        self, geometry: AttentionGeometry, pool: KVPool, prefill: Prefill | None = None
    ) -> None:
        super().__init__(geometry, pool)
        span = geometry.span
        assert span is None or span.slides
        self._prefill = prefill or PagedPrefill(
            self._layers[0], geometry.num_heads, geometry.scale, span.size if span else None
        )

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry) -> int:
        return super().workspace_bytes(geometry) + NUM_PLANS * PLAN_BYTES

    def context_plans(self, limits: PrefillLimits) -> FlashInferContexts | None:
        prefill = self._prefill.in_place(limits)
        return None if prefill is None else FlashInferContexts(prefill, limits, self.pool.page_size)

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        if not metadata.context_lens:
            return super().plan(metadata)
        rows = PrefillRows.build(
            metadata.context_lens,
            metadata.context_kv_lens,
            metadata.block_tables,
            self.pool.page_size,
        )
        windows = self._plan_windows(metadata)
        return FlashInferPlan(
            metadata.kv_slots, (), None, windows, None, rows.num_rows, self._prefill.plan(rows)
        )

    def run(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        norm: HeadWeights | None = None,
    ) -> torch.Tensor:
        if not isinstance(plan, FlashInferPlan):
            return super().run(layer, qkv, rotary, plan, norm)
        num_rows = plan.num_rows
        rotary_write(
            qkv[:num_rows],
            rotary.first(num_rows),
            plan.kv_slots[:num_rows],
            self._layers[layer],
            norm,
        )
        q, _ = self.split(qkv)
        output = q.new_empty(q.shape)
        self._prefill.run(plan.prefill, q[:num_rows], self._layers[layer], output[:num_rows])
        output = output.flatten(1)
        if plan.windows is not None:
            output[num_rows:] = self._run_windows(layer, qkv, rotary, plan.windows, norm)
        return output
