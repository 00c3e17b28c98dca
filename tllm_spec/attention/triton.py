"""TRITON: generation windows run a kernel that reads lengths and block tables from the device;
context chunks run as in VANILLA. Without Triton the kernels' plain-torch references run.

A plan without context chunks depends on no length, so a CUDA graph can hold its forward. Before a
capture, a forward of the same shape must have run: kernels are compiled at their first launch."""

from dataclasses import dataclass, replace

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.attention.vanilla import VanillaAttention, VanillaPlan
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary, rotary_write
from tllm_spec.kernels.round_rows import RoundRows
from tllm_spec.kernels.window_attention import WindowTables, window_attention
from tllm_spec.kernels.window_splits import MAX_PARTIAL_ROWS, WindowWorkspace


@dataclass(frozen=True)
class WindowPlan:
    """All generation windows, which start at row `first`. Tensors are views of the metadata."""

    first: int
    tables: WindowTables


@dataclass(frozen=True)
class TritonPlan(VanillaPlan):
    """VANILLA's chunks, and `windows` instead of its generation plan."""

    windows: WindowPlan | None


class TritonAttention(VanillaAttention):
    """As in VANILLA, a request's result depends on its own tokens only."""

    supports_graphs = True

    def __init__(self, geometry: AttentionGeometry, pool: KVPool) -> None:
        super().__init__(geometry, pool)
        self._layers = pool.data.unbind(0)
        self._workspace = WindowWorkspace.allocate(geometry.head_dim, pool.data.device)

    @classmethod
    def workspace_bytes(cls, geometry: AttentionGeometry) -> int:
        return MAX_PARTIAL_ROWS * (geometry.head_dim + 1) * torch.float32.itemsize

    def plan(self, metadata: AttentionMetadata) -> TritonPlan:
        contexts = super().plan(replace(metadata, rows=RoundRows.rectangle(0, 1))).contexts
        return TritonPlan(metadata.kv_slots, contexts, None, self._plan_windows(metadata))

    def run(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        norm: HeadWeights | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, TritonPlan)
        windows = plan.windows
        if windows is None or windows.first:
            first = len(qkv) if windows is None else windows.first
            rotary_write(
                qkv[:first], rotary.first(first), plan.kv_slots[:first], self._layers[layer], norm
            )
        q, kv = self.split(qkv)
        outputs = [self._run_context(layer, q, kv, context) for context in plan.contexts]
        if windows is not None:
            outputs.append(self._run_windows(layer, qkv, rotary, windows, norm))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan_windows(self, metadata: AttentionMetadata) -> WindowPlan | None:
        batch = metadata.rows.num_requests
        if not batch:
            return None
        first, tree = sum(metadata.context_lens), metadata.tree
        spans = self._spans(metadata, first)
        if spans is not None and tree is not None:
            tree = spans.cut(tree)
        tables = WindowTables(
            metadata.rows,
            metadata.block_tables[-batch:],
            metadata.kv_lens[-batch:],
            metadata.kv_slots[first:],
            metadata.num_padding,
            tree,
            spans,
        )
        return WindowPlan(first, tables)

    def _run_windows(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: WindowPlan,
        norm: HeadWeights | None,
    ) -> torch.Tensor:
        return window_attention(
            qkv[plan.first :],
            rotary.cos_sin[plan.first :],
            self._layers[layer],
            plan.tables,
            self.geometry.scale,
            self._workspace,
            norm,
        )
