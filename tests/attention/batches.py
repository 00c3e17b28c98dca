"""Batches of chunks, windows and trees on shuffled pages, what a backend gives for them, and the
formula of attention row by row."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.attention.plain_prefill import PlainPrefill
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.interface import (
    AttentionMetadata,
    AttentionPlan,
    HeadsBackend,
    HeadsInputs,
)
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.kv_codes import KVScales, encoded
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.attention.visible_keys import KeySpan, TreeMask

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreted" if INTERPRETED else "reference"),
        *([] if INTERPRETED else [CUDA]),
    ],
)
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2, 6, 2, 16, 4
LAYER = 1  # the one that runs
GEOMETRY = AttentionGeometry(LAYERS, HEADS, KV_HEADS, HEAD_DIM, 0.3)


@dataclass(frozen=True)
class Batch:
    """Chunks as (cached tokens, new tokens), then windows by their lengths, then rows of graph
    padding. counts: rows of each request's window; otherwise all have `window`. span and has_sinks:
    of the geometry. scales: of the layer that runs in a pool of FP8 codes; None: it has numbers."""

    chunks: tuple[tuple[int, int], ...] = ()
    kv_lens: tuple[int, ...] = ()
    window: int = 1
    padding: int = 0
    counts: tuple[int, ...] = ()
    span: KeySpan | None = None
    scales: KVScales | None = None
    has_sinks: bool = False


class Forward:
    """One batch on shuffled pages of a pool of random numbers, the same for every backend."""

    def __init__(
        self,
        batch: Batch,
        device: str,
        seed: int = 0,
        geometry: AttentionGeometry = GEOMETRY,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, generator = torch.device(device), torch.Generator().manual_seed(seed)
        self.geometry = replace(geometry, span=batch.span, has_sinks=batch.has_sinks)
        self.page_size, self.dtype, self.scales = page_size, dtype, batch.scales
        heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.sinks = torch.linspace(-2, 6, heads, device=device) if batch.has_sinks else None
        counts = batch.counts or (batch.window,) * (len(batch.kv_lens) + batch.padding)
        self.new = [*(count for _, count in batch.chunks), *counts]
        lengths = [*map(sum, batch.chunks), *batch.kv_lens, *[batch.window] * batch.padding]
        real, width = len(lengths) - batch.padding, -(-max(lengths) // page_size) + 1
        self.num_pages = real * width + 1
        tables = (torch.randperm(self.num_pages - 1, generator=generator) + 1).view(real, width)
        self.tables = torch.cat((tables, torch.zeros(batch.padding, width, dtype=torch.int64)))
        positions = [
            torch.arange(end - count, end) for end, count in zip(lengths, self.new, strict=True)
        ]
        slots = [self.slots(request, own) for request, own in enumerate(positions)]
        num_chunks = len(batch.chunks)
        self.metadata = AttentionMetadata(
            context_lens=tuple(self.new[:num_chunks]),
            context_kv_lens=tuple(lengths[:num_chunks]),
            rows=rows_of(counts, device=device),
            block_tables=self.tables.to(self.device, torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            positions=torch.cat(positions).to(self.device),
            kv_slots=torch.cat(slots).to(self.device),
            max_kv_len=max(batch.kv_lens, default=0),
        )
        shape = (LAYERS, 2, self.num_pages, page_size, kv_heads, head_dim)
        self.pool_data = torch.randn(shape, generator=generator)
        qkv = torch.randn(sum(self.new), heads + 2 * kv_heads, head_dim, generator=generator)
        self.qkv = qkv.to(self.device, dtype)
        angles = torch.rand(width * page_size, head_dim // 2, generator=generator) * 7
        angles, signs = angles.repeat(1, 2), torch.tensor([-1.0, 1.0])
        sines = angles.sin() * signs.repeat_interleave(head_dim // 2)
        table = torch.stack((angles.cos(), sines), dim=1)[:, :, None]
        self.table = table.to(self.device, dtype)

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.page_size
        return self.tables[request, positions // size] * size + positions % size

    def poison(self) -> None:
        """Slots that no earlier token has written become NaN."""
        unwritten = torch.ones(self.num_pages * self.page_size, dtype=torch.bool)
        for request, end in enumerate(self.metadata.kv_lens.tolist()):
            unwritten[self.slots(request, torch.arange(end - self.new[request]))] = False
        self.pool_data.flatten(2, 3)[:, :, unwritten] = torch.nan

    def rows_of(self, request: int) -> slice:
        return slice(sum(self.new[:request]), sum(self.new[: request + 1]))

    def only(self, request: int, count: int | None = None) -> "Forward":
        """A forward of the last `count` rows of one request over the same pool; None: of all."""
        own, count = self.metadata, count or self.new[request]
        end, kv_len = self.rows_of(request).stop, int(own.kv_lens[request])
        rows, is_chunk = slice(end - count, end), request < len(own.context_lens)
        found = copy.copy(self)
        found.qkv, found.new = self.qkv[rows], [count]
        found.metadata = replace(
            own,
            context_lens=(count,) if is_chunk else (),
            context_kv_lens=(kv_len,) if is_chunk else (),
            rows=rows_of([] if is_chunk else [count], device=str(self.device)),
            block_tables=own.block_tables[request : request + 1],
            kv_lens=own.kv_lens[request : request + 1],
            positions=own.positions[rows],
            kv_slots=own.kv_slots[rows],
            max_kv_len=0 if is_chunk else kv_len,
        )
        return found

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.table, self.metadata.positions)

    def pool(self) -> KVPool:
        scales = self.scales and (KVScales(), self.scales)
        pool = KVPool(
            self.geometry,
            num_pages=self.num_pages,
            page_size=self.page_size,
            kv_format=KVFormat(self.dtype, scales),
            device=self.device,
        )
        for data, numbers, own in zip(
            pool.data, self.pool_data, scales or (None, None), strict=True
        ):
            if own is not None:
                parts = zip(numbers, (own.key, own.value), strict=True)
                numbers = torch.stack([encoded(*part) for part in parts])
            data.copy_(numbers)
        return pool

    def backend(self, kind: type[HeadsBackend]) -> HeadsBackend:
        if kind is FlashInferAttention:
            return FlashInferAttention(self.geometry, self.pool(), PlainPrefill(self.geometry))
        return kind(self.geometry, self.pool())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The inputs of a forward on the device."""
        own = self.metadata
        return self.qkv, self.table, own.block_tables, own.kv_lens, own.positions, own.kv_slots

    def run(self, backend: HeadsBackend, plan: Any = None) -> torch.Tensor:
        plan = backend.plan(self.metadata) if plan is None else plan
        qkv = self.qkv.clone()  # the rotation is in place
        return backend.run(LAYER, HeadsInputs(qkv, sinks=self.sinks), self.rotary, plan)

    def write(self, backend: HeadsBackend) -> None:
        plan = AttentionPlan(self.metadata.kv_slots)
        backend.write(LAYER, HeadsInputs(self.qkv.clone()), self.rotary, plan)

    def check(self, output: torch.Tensor | None, pool: KVPool) -> None:
        """The output, if there is one, and the pool equal VANILLA's, keys up to rounding, without
        page 0, to which padding writes."""
        vanilla = self.backend(VanillaAttention)
        expected = self.run(vanilla)
        if output is not None:
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            pool.data[:, 0, 1:], vanilla.pool.data[:, 0, 1:], rtol=2e-6, atol=2e-6
        )
        assert torch.equal(pool.data[:, 1, 1:], vanilla.pool.data[:, 1, 1:])

    def heads(self) -> torch.Tensor:
        """`[T, Hq + 2 * Hkv, D]`: the heads of the forward's rows, rotated."""
        qkv = self.qkv.clone()
        plain_rotate(qkv[:, : -self.geometry.num_kv_heads], self.rotary)
        return qkv

    def seen(self, request: int, row: int, position: int) -> list[int]:
        """The keys that a row of a request sees, whose last one is at `position`."""
        span = self.geometry.span
        return list(range(0 if span is None else span.first_key(position), position + 1))

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """The request of each row, and the keys that it sees."""
        for request, (count, end) in enumerate(
            zip(self.new, self.metadata.kv_lens.tolist(), strict=True)
        ):
            for row in range(count):
                yield request, self.seen(request, row, end - count + row)

    def formula(self, pool: KVPool) -> torch.Tensor:
        """softmax(scale * q k) v, row by row, over what the pool holds, `[T, Hq * D]`."""
        outputs, geometry = [], self.geometry
        scales = self.scales or KVScales()
        keys, values = pool.data[LAYER].float().flatten(1, 2)
        stored = torch.stack((keys * scales.key, values * scales.value))
        group = geometry.num_heads // geometry.num_kv_heads
        for q, (request, seen) in zip(self.heads(), self.rows(), strict=True):
            slots = self.slots(request, torch.tensor(seen)).to(self.device)
            keys, values = stored[:, slots].repeat_interleave(group, dim=2)
            scores = torch.einsum("hd,lhd->hl", q[: geometry.num_heads], keys) * geometry.scale
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[:, None]), 1)
            weights = scores.softmax(1)[:, : len(seen)]
            outputs.append(torch.einsum("hl,lhd->hd", weights, values).flatten())
        return torch.stack(outputs)


class TreeForward(Forward):
    """The windows are the last rows of a random tree, another one for each request."""

    def __init__(self, batch: Batch, offset: int, device: str, seed: int = 0) -> None:
        super().__init__(batch, device, seed)
        counts = batch.counts or (batch.window,) * len(batch.kv_lens)
        generator, rows = torch.Generator().manual_seed(seed), self.metadata.rows
        self.paths = [random_paths(offset + count, generator)[offset:] for count in counts]
        self.firsts = [n - offset - count for n, count in zip(batch.kv_lens, counts, strict=True)]
        bits = torch.tensor([each for own in self.paths for each in bits_of(own)], device=device)
        part = rows if batch.counts else None
        bits = bits if batch.counts else bits.view(len(counts), -1)
        self.metadata.tree = TreeMask(bits, offset + rows.window, part)
        depths = [
            first + len(path) - 1
            for first, paths in zip(self.firsts, self.paths, strict=True)
            for path in paths
        ]
        self.metadata.positions[-len(depths) :] = torch.tensor(depths, device=device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self.metadata.tree is not None
        return *super().tensors(), self.metadata.tree.bits

    def seen(self, request: int, row: int, position: int) -> list[int]:
        window = request - len(self.metadata.context_lens)
        if window < 0:
            return super().seen(request, row, position)
        first = self.firsts[window]
        return [*range(first), *(first + key for key in self.paths[window][row])]
