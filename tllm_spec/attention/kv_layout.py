"""What the KV pool holds for a token of one layer. Page tables, prefix reuse and rewinds do not
know it: they only count pages."""

from dataclasses import dataclass
from typing import Protocol


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
