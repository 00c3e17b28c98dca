"""A model whose layers attend within chunks of positions in part (Llama 4): a backend for these
layers and one for the others, over the same pool."""

from dataclasses import dataclass

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan, HeadsBackend
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary


@dataclass(frozen=True)
class ChunkedPlan(AttentionPlan):
    """Of both backends."""

    chunked: AttentionPlan
    unchunked: AttentionPlan


class ChunkedAttention(HeadsBackend):
    """geometry: of the model. The backends' geometries differ from it in the chunks only."""

    def __init__(
        self, geometry: AttentionGeometry, chunked: HeadsBackend, unchunked: HeadsBackend
    ) -> None:
        super().__init__(geometry, chunked.pool)
        self.chunked, self.unchunked = chunked, unchunked
        self.supports_graphs = chunked.supports_graphs and unchunked.supports_graphs

    def plan(self, metadata: AttentionMetadata) -> ChunkedPlan:
        return ChunkedPlan(
            metadata.kv_slots, self.chunked.plan(metadata), self.unchunked.plan(metadata)
        )

    def run(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotary: Rotary,
        plan: AttentionPlan,
        norm: HeadWeights | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, ChunkedPlan)
        if layer in self.geometry.unchunked_layers:
            return self.unchunked.run(layer, qkv, rotary, plan.unchunked, norm)
        return self.chunked.run(layer, qkv, rotary, plan.chunked, norm)
