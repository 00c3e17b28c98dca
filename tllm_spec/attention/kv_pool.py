"""The paged KV memory of one model on one device. Which page is whose only the KV cache manager
knows."""

import torch

from tllm_spec.attention.geometry import AttentionGeometry


class KVPool:
    """`data`: `[layers, 2, pages, page_size, kv_heads, head_dim]`, keys at 0 and values at 1.

    A slot is one token's place: `page * page_size + offset`. The memory starts as zeros: a masked
    value is still multiplied by zero, and must be a number for that."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            geometry.num_layers,
            2,
            num_pages,
            page_size,
            geometry.num_kv_heads,
            geometry.head_dim,
        )
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size

    @staticmethod
    def page_bytes(geometry: AttentionGeometry, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers: what memory planning divides by."""
        return (
            geometry.num_layers
            * 2
            * page_size
            * geometry.num_kv_heads
            * geometry.head_dim
            * dtype.itemsize
        )

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in all layers (a partly matching prefix block gets its own copy to write
        on)."""
        self.data[:, :, destination].copy_(self.data[:, :, source])
