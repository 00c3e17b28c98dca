"""FLASHINFER: context chunks run FlashInfer's paged prefill, generation windows run as in TRITON.

A forward without chunks is the same as TRITON's, in CUDA graphs too. Context chunks are planned
once per forward from lengths on the host; page numbers stay on the device. On Hopper, CUDA graphs
of context chunks share a plan that is updated in place. FP8 codes are widened into a bounded copy
first; chunks whose requests have more pages run as in TRITON."""

from collections.abc import Sequence
from typing import Any

import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool, WidePages
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan, HeadsInputs
from tllm_spec.attention.triton import TritonAttention, TritonPlan
from tllm_spec.kernels.attention.paged_prefill import (
    NUM_PLANS,
    PLAN_BYTES,
    PagedPrefill,
    PrefillInPlace,
    PrefillLimits,
    PrefillRows,
)
from tllm_spec.kernels.attention.rotary_write import Rotary

HEAD_DIMS = (64, 128, 256)  # that FlashInfer has kernels for
DTYPES = (torch.bfloat16, torch.float16)


class FlashInferContexts:
    """A plan of a fixed number of context chunks in memory with fixed addresses, which is updated
    in place, so that a CUDA graph can hold their forward."""

    def __init__(
        self, prefill: PrefillInPlace, limits: PrefillLimits, page_size: int, wide: WidePages | None
    ) -> None:
        self._prefill, self._limits, self._page_size = prefill, limits, page_size
        self._plan: Any = None
        self._wide, self._page_list = wide, None
        if wide is not None:
            self._page_list = wide.page_list(limits.num_chunks * limits.max_pages)

    def fits(self, kv_lens: Sequence[int]) -> bool:
        """Whether chunks of requests with so many tokens can be planned."""
        if self._page_list is None:
            return True
        num_pages = sum(-(-length // self._page_size) for length in kv_lens)
        return num_pages <= len(self._page_list[0])

    def update(self, lens: Sequence[int], kv_lens: Sequence[int], pages: torch.Tensor) -> None:
        """The next replay runs chunks of `lens` tokens, as many as the limits say, and no windows.
        kv_lens: as `context_kv_lens`. pages: int32, on the device: the pages that hold the first
        chunk's request up to its length, then those of the second's, and so on."""
        assert len(lens) == self._limits.num_chunks
        rows = PrefillRows.of_pages(lens, kv_lens, pages, self._page_size)
        if self._wide is not None:
            assert self._page_list is not None
            own, count = self._page_list
            own[: len(pages)].copy_(pages)
            count.fill_(len(pages))
            rows = self._wide.rows(rows)
        self._plan = self._prefill.plan(rows)

    def for_graph(self, kv_slots: torch.Tensor) -> TritonPlan:
        """The plan for capturing a forward of T rows; `kv_slots` `[T]` holds the slots of the rows
        of each replay."""
        assert self._plan is not None
        parts = self._plan, self._page_list
        return TritonPlan(kv_slots, len(kv_slots), (), None, None, None, *parts)


class FlashInferAttention(TritonAttention):
    """Raises what `PagedPrefill` raises if its kernels cannot be used. `prefill` replaces it in
    tests."""

    def __init__(
        self, geometry: AttentionGeometry, pool: KVPool, prefill: PagedPrefill | None = None
    ) -> None:
        super().__init__(geometry, pool)
        span = geometry.span
        assert span is None or span.slides
        has_codes = pool.kv_format.scales is not None
        self._wide = WidePages(pool) if has_codes else None
        self._prefill = prefill or PagedPrefill(
            self._layers[0] if self._wide is None else self._wide.layer,
            geometry.num_heads,
            geometry.scale,
            span.size if span else None,
        )

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry, kv_format: KVFormat) -> int:
        wide_bytes = WidePages.num_bytes(geometry, kv_format)
        return super().workspace_bytes(geometry, kv_format) + NUM_PLANS * PLAN_BYTES + wide_bytes

    def context_plans(self, limits: PrefillLimits) -> FlashInferContexts | None:
        prefill = self._prefill.in_place(limits)
        if prefill is None:
            return None
        return FlashInferContexts(prefill, limits, self.pool.page_size, self._wide)

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        if not metadata.context_lens:
            return super().plan(metadata)
        rows = PrefillRows.build(
            metadata.context_lens,
            metadata.context_kv_lens,
            metadata.block_tables,
            self.pool.page_size,
        )
        page_list = None
        if self._wide is not None:
            if len(rows.pages) > self._wide.num_pages:
                return super().plan(metadata)
            rows, page_list = self._wide.rows(rows), (rows.pages, None)
        windows, prefill = self._plan_windows(metadata), self._prefill.plan(rows)
        parts = (), None, windows, None, prefill, page_list
        return TritonPlan(metadata.kv_slots, rows.num_rows, *parts)

    def run(
        self, layer: int, inputs: HeadsInputs, rotary: Rotary, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, TritonPlan)
        if plan.prefill is None:
            return super().run(layer, inputs, rotary, plan)
        num_rows, (qkv, norm, sinks) = plan.first, inputs
        own = AttentionPlan(plan.kv_slots[:num_rows])
        self.write(layer, HeadsInputs(qkv[:num_rows], norm), rotary.first(num_rows), own)
        keys_and_values = self._layers[layer]
        if self._wide is not None:
            assert plan.page_list is not None
            self._wide.fill(keys_and_values, *plan.page_list)
            keys_and_values = self._wide.layer
        q = qkv[:, : self.geometry.num_heads]
        output = q.new_empty(q.shape)
        self._prefill.run(
            *(plan.prefill, q[:num_rows], keys_and_values, output[:num_rows]),
            *(self.pool.scales[layer], sinks),
        )
        output = output.flatten(1)
        if plan.windows is not None:
            output[num_rows:] = self._run_windows(layer, inputs, rotary, plan)
        return output
