"""The sizes of attention that pools, backends and models share."""

from dataclasses import dataclass, replace
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
    chunk_size: int | None = None
    """A query at position p sees the keys from position p // chunk_size * chunk_size on. None: all
    keys before it."""
    unchunked_layers: frozenset[int] = frozenset()
    """Whose queries see all keys before them all the same."""

    def of_chunked_layers(self) -> "AttentionGeometry":
        """With chunks in all layers."""
        return replace(self, unchunked_layers=frozenset())

    def of_unchunked_layers(self) -> "AttentionGeometry":
        """With chunks in no layer."""
        return replace(self, chunk_size=None, unchunked_layers=frozenset())

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
