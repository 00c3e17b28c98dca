"""The sizes of attention that pools, backends and models agree on. Plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionGeometry:
    """The sizes of one rank's share of the heads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
