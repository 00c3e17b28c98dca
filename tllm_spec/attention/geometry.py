"""The sizes of attention that pools, backends and models share, and the layers that have equal
ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tllm_spec.kernels.attention.visible_keys import KeySpan

# What the KV pool holds for a token of one layer. Page tables, prefix reuse and rewinds do not
# know it: they only count pages.


class KVLayout(Protocol):
    """The shape of one layer of the pool."""

    @property
    def page_dim(self) -> int:
        """The dimension of `layer_shape` that counts pages."""

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class HeadsLayout:
    """A key and a value for each KV head (MHA, GQA, MQA)."""

    num_kv_heads: int
    head_dim: int

    @property
    def page_dim(self) -> int:
        return 1

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """`[2, pages, page_size, kv_heads, head_dim]`: keys at 0, values at 1."""
        return (2, num_pages, page_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class LatentLayout:
    """MLA (arXiv 2405.04434, section 2.1): one latent vector, which the keys and values of all
    heads are projected from, and one rotated key that all heads share."""

    latent_dim: int
    rope_dim: int

    @property
    def page_dim(self) -> int:
        return 0

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """`[pages, page_size, latent_dim + rope_dim]`."""
        return (num_pages, page_size, self.entry_dim)

    @property
    def entry_dim(self) -> int:
        """Elements of a token."""
        return self.latent_dim + self.rope_dim


class Geometry(Protocol):
    """What pools and memory planning need of one rank's attention, whatever its layout is."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def span(self) -> KeySpan | None:
        """The keys that a query sees; None: all keys up to its own."""


@dataclass(frozen=True)
class AttentionGeometry:
    """One rank's share of the heads. `scale` multiplies the scores before the softmax."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    span: KeySpan | None = None
    """The keys that a query sees. None: all keys up to its own."""
    has_sinks: bool = False
    """Whether each head has a sink (kernels/attention/attention_sinks.py)."""
    feeds_codes: bool = False
    """Whether the next layer quantises its input, so that a last bit may change a whole code."""

    @property
    def layout(self) -> HeadsLayout:
        return HeadsLayout(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a model whose attention is equal. A group has a KV pool, a block table and a
    backend of its own, in which its layers are numbered from 0 on."""

    layers: tuple[int, ...]
    geometry: Geometry


def place_of(layer: int, groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """The group that has the layer, and the layer's number in it."""
    for number, group in enumerate(groups):
        if layer in group.layers:
            return number, group.layers.index(layer)
    raise AssertionError(f"no group has layer {layer}")


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
    span: None = None

    @property
    def layout(self) -> LatentLayout:
        return LatentLayout(self.latent_dim, self.rope_dim)
