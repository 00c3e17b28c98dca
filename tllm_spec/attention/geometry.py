"""The sizes of attention that pools, backends and models share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionGeometry:
    """One rank's share of the heads. `scale` multiplies the scores before the softmax."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
