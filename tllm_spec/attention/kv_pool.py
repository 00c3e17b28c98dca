"""The paged KV memory of a layer group on one device. The KV cache manager knows which request owns
a page."""

import math

import numpy as np
import torch

from tllm_spec.attention.geometry import Geometry
from tllm_spec.attention.kv_format import KVFormat
from tllm_spec.kernels.attention.kv_codes import movable


class KVPool:
    """`data`: `[layers, *KVLayout.layer_shape]`.

    A slot is the index of one token: `page * page_size + offset`. The memory starts as zeros, since
    masked values are still multiplied by zero and must not be NaN."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_pages: int,
        page_size: int,
        kv_format: KVFormat,
        device: torch.device,
    ) -> None:
        layout = geometry.layout
        shape = (geometry.num_layers, *layout.layer_shape(num_pages, page_size))
        self.data = _zeros(shape, kv_format.stored, device)
        self.kv_format = kv_format
        self.num_pages = num_pages
        self.page_size = page_size
        self._page_dim = 1 + layout.page_dim
        self.planes = movable(self.data).flatten(0, layout.page_dim).flatten(3)
        """A view, `[planes, pages, page_size, width]`: what each layer has of every token, a plane
        for its keys and one for its values, or one for its latents."""

    @staticmethod
    def page_bytes(geometry: Geometry, page_size: int, kv_format: KVFormat) -> int:
        """Bytes of one page over all layers, for memory planning."""
        layer = math.prod(geometry.layout.layer_shape(1, page_size))
        return geometry.num_layers * layer * kv_format.stored.itemsize

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page in all layers: a prefix that matches part of a page continues on a copy."""
        self.page(destination).copy_(self.page(source))

    def page(self, number: int) -> torch.Tensor:
        """A view of one page in all layers, not contiguous."""
        return self.data.select(self._page_dim, number)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the system gives each piece of memory when it is first written, and zeroed. So a
    pool takes only what requests use; `torch.zeros` would write all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.zeros(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
