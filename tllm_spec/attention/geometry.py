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

    def pool_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Of the KV pool, `[layers, 2, pages, page_size, kv_heads, head_dim]`: a key and a value
        for each head and token."""
        return (self.num_layers, 2, num_pages, page_size, self.num_kv_heads, self.head_dim)
