"""The paged KV memory of one model on one device. The KV cache manager knows which request owns a
page."""

import math

import torch

from tllm_spec.attention.geometry import AttentionGeometry


class KVPool:
    """`data`: `AttentionGeometry.pool_shape`, keys at 0 and values at 1.

    A slot is the index of one token: `page * page_size + offset`. The memory starts as zeros, since
    masked values are still multiplied by zero and must not be NaN."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = geometry.pool_shape(num_pages, page_size)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size

    @staticmethod
    def page_bytes(geometry: AttentionGeometry, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, for memory planning."""
        return math.prod(geometry.pool_shape(1, page_size)) * dtype.itemsize

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in all layers: a prefix that matches part of a page continues on a copy."""
        self.data[:, :, destination].copy_(self.data[:, :, source])
