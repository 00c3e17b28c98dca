"""The sizes of attention that pools, backends and models share."""

from dataclasses import dataclass
from typing import Protocol

from tllm_spec.attention.kv_layout import HeadsLayout, KVLayout, LatentLayout


class Geometry(Protocol):
    """What pools and memory planning need of one rank's attention, whatever its layout is."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def layout(self) -> KVLayout: ...


@dataclass(frozen=True)
class AttentionGeometry:
    """One rank's share of the heads. `scale` multiplies the scores before the softmax."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def layout(self) -> HeadsLayout:
        return HeadsLayout(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class LatentGeometry:
    """MLA: one rank's share of the query heads. Each key has `nope_dim` elements of its own, which
    come from the latent, and the `rope_dim` elements of the shared rotated key. `scale` multiplies
    the scores before the softmax."""

    num_layers: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float

    @property
    def layout(self) -> LatentLayout:
        return LatentLayout(self.latent_dim, self.rope_dim)
