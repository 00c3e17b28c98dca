"""The sizes of attention that pools, backends and models share, the layers that have equal ones,
and their paged KV memory on one device. The KV cache manager knows which request owns a page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales, movable, widen_pages
from tllm_spec.kernels.attention.paged_prefill import PrefillRows
from tllm_spec.kernels.attention.visible_keys import KeySpan


@dataclass(frozen=True)
class AttentionGeometry:
    """A key and a value for each KV head (MHA, GQA, MQA): one rank's share of the heads. `scale`
    multiplies the scores before the softmax."""

    page_dim: ClassVar[int] = 1
    """The dimension of `layer_shape` that counts pages."""

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

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """A layer: `[2, pages, page_size, kv_heads, head_dim]`, keys at 0, values at 1."""
        return (2, num_pages, page_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class LatentGeometry:
    """MLA (arXiv 2405.04434, section 2.1): one latent vector, which the keys and values of all
    heads are projected from, and one rotated key that all heads share. One rank's share of the
    query heads. Each key has `nope_dim` elements of its own, which come from the latent, and the
    `rope_dim` elements of the shared rotated key. `scale` multiplies the scores before the
    softmax."""

    page_dim: ClassVar[int] = 0
    """The dimension of `layer_shape` that counts pages."""

    num_layers: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    topk: int | None = None
    """The keys that a row attends to, which an indexer chooses; None: all."""
    span: None = None

    @property
    def entry_dim(self) -> int:
        """Elements of a token."""
        return self.latent_dim + self.rope_dim

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """A layer of the pool: `[pages, page_size, latent_dim + rope_dim]`."""
        return (num_pages, page_size, self.entry_dim)


@dataclass(frozen=True)
class IndexGeometry:
    """An indexer (DeepSeek V3.2): a key for each token, by which a row chooses `topk` tokens. These
    keys are in the pages of the latents of the group before, and never FP8 codes."""

    page_dim: ClassVar[int] = 0
    """The dimension of `layer_shape` that counts pages."""

    num_layers: int
    num_heads: int
    head_dim: int
    topk: int
    span: None = None

    def layer_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """A layer of the pool: `[pages, page_size, head_dim]`."""
        return (num_pages, page_size, self.head_dim)


# What pools and memory planning know. Page tables, prefix reuse and rewinds only count pages.
Geometry = AttentionGeometry | LatentGeometry | IndexGeometry


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


# How a KV pool stores numbers.


@dataclass(frozen=True)
class KVFormat:
    """Keys, values or latents of a model that computes in `dtype`."""

    dtype: torch.dtype
    scales: tuple[KVScales, ...] | None = None
    """One for each of the pool's layers: the pool has FP8 codes. None: it has numbers of type
    `dtype`."""

    @property
    def stored(self) -> torch.dtype:
        """The type of what is in the pool."""
        return self.dtype if self.scales is None else CODES

    def of_layers(self, layers: Sequence[int]) -> "KVFormat":
        """The format of a pool that has some of the layers."""
        if self.scales is None:
            return self
        return KVFormat(self.dtype, tuple(self.scales[layer] for layer in layers))


class KVPool:
    """`data`: `[layers, *layer_shape]` of the geometry; `scales`: of each layer.

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
        take: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """take: gives so many zeroed bytes of the device; None: torch and numpy do."""
        shape = (geometry.num_layers, *geometry.layer_shape(num_pages, page_size))
        stored = kv_format.stored
        if take is None:
            self.data = _zeros(shape, stored, device)
        else:
            self.data = take(math.prod(shape) * stored.itemsize).view(stored).view(shape)
        self.kv_format = kv_format
        self.scales = kv_format.scales or (UNSCALED,) * geometry.num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self._page_dim = 1 + geometry.page_dim
        self.planes = movable(self.data).flatten(0, geometry.page_dim).flatten(3)
        """A view, `[planes, pages, page_size, width]`: what each layer has of every token, a plane
        for its keys and one for its values, or one for its latents."""

    @staticmethod
    def page_bytes(geometry: Geometry, page_size: int, kv_format: KVFormat) -> int:
        """Bytes of one page over all layers, for memory planning."""
        layer = math.prod(geometry.layer_shape(1, page_size))
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


# A bounded copy of pages of FP8 codes as numbers of the model's type, for attention kernels that
# read no codes. Each layer overwrites it.


MAX_TOKENS = 1 << 16


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

    def fill(self, layer: torch.Tensor, pages: torch.Tensor, count: torch.Tensor | None) -> None:
        """Copies pages `[N]` int32 of a layer of the pool. count `[1]` int32: only so many; None:
        all."""
        widen_pages(layer, pages, count, self.layer)

    def page_list(self, max_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and their count, with room for `max_pages`, or for as many as the copy has."""
        pages = torch.zeros_like(self._numbers[:max_pages])
        return pages, pages.new_zeros(1)
