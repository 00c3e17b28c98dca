"""The plain-torch reference of FlashInfer's prefill, with the interface of its wrappers."""

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales
from tllm_spec.kernels.attention.paged_prefill import (
    PrefillLimits,
    PrefillRows,
    plain_paged_prefill,
)


class PlainPrefill:
    """The reference of `PagedPrefill`."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self.scale = geometry.scale
        self.window = geometry.span.size if geometry.span else None

    def plan(self, rows: PrefillRows) -> PrefillRows:
        return rows

    def run(
        self,
        plan: "PrefillRows | PlainInPlace",
        q: torch.Tensor,
        layer: torch.Tensor,
        out: torch.Tensor,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> None:
        rows = plan.rows if isinstance(plan, PlainInPlace) else plan
        assert rows.num_rows == len(q)
        plain_paged_prefill(q, layer, rows, self.scale, out, self.window, scales, sinks)

    def in_place(self, limits: PrefillLimits) -> "PlainInPlace | None":
        return PlainInPlace(limits)


class PlainInPlace:
    """The reference of `PrefillInPlace`: planning changes the plan that callers hold."""

    rows: PrefillRows

    def __init__(self, limits: PrefillLimits) -> None:
        self.limits = limits

    def plan(self, rows: PrefillRows) -> "PlainInPlace":
        limits, counts = self.limits, rows.page_starts.diff()
        assert len(rows.kv_lens) == limits.num_chunks and rows.num_rows <= limits.max_rows
        assert counts.max() <= limits.max_pages
        self.rows = rows
        return self
