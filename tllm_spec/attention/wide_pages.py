"""A bounded copy of pages of FP8 codes as numbers of the model's type, for attention kernels that
read no codes. Each layer overwrites it."""

from dataclasses import dataclass, replace

import torch

from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.kernels.attention.kv_codes import widen_pages
from tllm_spec.kernels.attention.paged_prefill import PrefillRows

MAX_TOKENS = 1 << 16


@dataclass(frozen=True)
class PageList:
    """The pages that are copied."""

    pages: torch.Tensor
    """[N] int32, on the device."""
    count: torch.Tensor | None = None
    """[1] int32, on the device: how many; None: N."""


class WidePages:
    """`layer` `[2, pages, page_size, Hkv, D]`: the copy of one layer."""

    def __init__(self, pool: KVPool) -> None:
        _, _, _, page_size, heads, head_dim = pool.data.shape
        number = min(pool.num_pages, max(1, MAX_TOKENS // page_size))
        shape = (2, number, page_size, heads, head_dim)
        self.layer = pool.data.new_zeros(shape, dtype=pool.kv_format.dtype)
        self.num_pages = number
        self._numbers = torch.arange(number, dtype=torch.int32, device=pool.data.device)

    @staticmethod
    def num_bytes(geometry: AttentionGeometry, kv_format: KVFormat) -> int:
        """Bytes of the copy, at most; 0 for a pool without codes."""
        elements = 2 * MAX_TOKENS * geometry.num_kv_heads * geometry.head_dim
        return 0 if kv_format.scales is None else elements * kv_format.dtype.itemsize

    def rows(self, rows: PrefillRows) -> PrefillRows:
        """The same rows over the copy of their pages."""
        return replace(rows, pages=self._numbers[: len(rows.pages)])

    def fill(self, layer: torch.Tensor, own: PageList) -> None:
        """layer: of the pool."""
        widen_pages(layer, own.pages, own.count, self.layer)

    def page_list(self, max_pages: int) -> PageList:
        """A list with room for `max_pages`, or for as many as the copy has."""
        pages = torch.zeros_like(self._numbers[:max_pages])
        return PageList(pages, pages.new_zeros(1))
