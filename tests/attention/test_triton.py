"""TRITON attention equals VANILLA: with the kernels' plain-torch references, with the kernels under
Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED
from tests.kernels.row_counts import rows_of
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.interface import AttentionMetadata, AttentionPlan, HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.dispatch import has_kernels

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreted" if INTERPRETED else "reference"),
        *([] if INTERPRETED else [CUDA]),
    ],
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WIDTH = 2, 6, 2, 16, 4, 80
GEOMETRY = AttentionGeometry(LAYERS, HEADS, KV_HEADS, HEAD_DIM, 0.3)


@dataclass(frozen=True)
class Batch:
    """Chunks as (cached tokens, new tokens), then windows by their lengths, then rows of graph
    padding. counts: rows of each request's window; otherwise all have `window`. span: of the
    geometry."""

    chunks: tuple[tuple[int, int], ...] = ()
    kv_lens: tuple[int, ...] = ()
    window: int = 1
    padding: int = 0
    counts: tuple[int, ...] = ()
    span: KeySpan | None = None


CHUNKS_OF_5, CHUNKS_OF_70 = (KeySpan(size, slides=False) for size in (5, 70))
SLIDING_5, SLIDING_70 = (KeySpan(size, slides=True) for size in (5, 70))
BATCHES = {
    "a prompt": Batch(chunks=((0, 9),)),
    "chunks": Batch(chunks=((0, 9), (7, 5), (12, 1))),
    "one token each": Batch(kv_lens=(1, 4, 5, 30)),
    "windows": Batch(kv_lens=(4, 300, 17), window=4),
    "chunks and windows": Batch(((0, 9), (7, 5)), (6, 12, 33), window=3),
    "windows of their own": Batch((), (40, 300, 17, 5), counts=(1, 4, 2, 5)),
    "chunks and such windows": Batch(((0, 9),), (6, 120, 33), counts=(3, 1, 1)),
    "such windows within chunks": Batch(((3, 9),), (6, 12), counts=(3, 5), span=CHUNKS_OF_5),
    "such sliding windows": Batch(((3, 9),), (6, 12, 300), counts=(3, 1, 5), span=SLIDING_5),
    "chunks and single tokens": Batch(((5, 2),), (8, 9)),
    "within chunks of 5": Batch(((0, 14), (3, 9), (5, 5)), (7, 12, 33, 300), 7, span=CHUNKS_OF_5),
    "within chunks of 70": Batch(((60, 20),), (70, 72, 300), 4, span=CHUNKS_OF_70),
    "a sliding window of 5": Batch(((0, 14), (3, 9), (5, 5)), (7, 12, 33, 300), 7, span=SLIDING_5),
    "a sliding window of 70": Batch(((60, 20),), (70, 72, 300), 4, span=SLIDING_70),
}


class Forward:
    """One batch on shuffled pages of a pool of random numbers, the same for every backend."""

    def __init__(self, batch: Batch, device: str, seed: int = 0) -> None:
        self.device, generator = torch.device(device), torch.Generator().manual_seed(seed)
        self.geometry = replace(GEOMETRY, span=batch.span)
        self.sinks: torch.Tensor | None = None
        counts = batch.counts or (batch.window,) * (len(batch.kv_lens) + batch.padding)
        new = [*(count for _, count in batch.chunks), *counts]
        lengths = (
            [sum(chunk) for chunk in batch.chunks]
            + list(batch.kv_lens)
            + [batch.window] * batch.padding
        )
        real = len(lengths) - batch.padding
        self.num_pages = real * WIDTH + 1
        tables = (torch.randperm(self.num_pages - 1, generator=generator) + 1).view(real, WIDTH)
        tables = torch.cat((tables, torch.zeros(batch.padding, WIDTH, dtype=torch.int64)))
        positions = [list(range(end - count, end)) for end, count in zip(lengths, new, strict=True)]
        slots = [
            int(table[i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE
            for table, row in zip(tables, positions, strict=True)
            for i in row
        ]
        self.metadata = AttentionMetadata(
            context_lens=tuple(new[: len(batch.chunks)]),
            context_kv_lens=tuple(lengths[: len(batch.chunks)]),
            rows=rows_of(counts, device=device),
            block_tables=tables.to(self.device, torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            positions=torch.tensor([i for row in positions for i in row], device=self.device),
            kv_slots=torch.tensor(slots, device=self.device),
            max_kv_len=max(batch.kv_lens, default=0),
        )
        shape = (LAYERS, 2, self.num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.pool_data = torch.randn(shape, generator=generator)
        self.qkv = torch.randn(len(slots), HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator).to(
            self.device
        )
        angles = torch.rand(WIDTH * PAGE_SIZE, HEAD_DIM // 2, generator=generator).repeat(1, 2) * 7
        sines = angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
        self.table = torch.stack((angles.cos(), sines), dim=1)[:, :, None].to(self.device)

    def backend(self, kind: type[HeadsBackend]) -> HeadsBackend:
        pool = KVPool(
            GEOMETRY,
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            kv_format=KVFormat(torch.float32),
            device=self.device,
        )
        pool.data.copy_(self.pool_data)
        return kind(self.geometry, pool)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The inputs of a forward on the device."""
        own = self.metadata
        return self.qkv, self.table, own.block_tables, own.kv_lens, own.positions, own.kv_slots

    def run(self, backend: HeadsBackend, plan: AttentionPlan | None = None) -> torch.Tensor:
        plan = backend.plan(self.metadata) if plan is None else plan
        rotary = Rotary(self.table, self.metadata.positions)
        qkv = self.qkv.clone()  # the rotation is in place
        return backend.run(1, qkv, rotary, plan, sinks=self.sinks)

    def write(self, backend: HeadsBackend) -> None:
        rotary = Rotary(self.table, self.metadata.positions)
        backend.write(1, self.qkv.clone(), rotary, AttentionPlan(self.metadata.kv_slots))

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


@on_each_device
@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_every_kind_of_batch_equals_vanilla(name: str, device: str) -> None:
    assert has_kernels(torch.device(device)) == (INTERPRETED or device == "cuda")
    forward = Forward(BATCHES[name], device)
    backend = forward.backend(TritonAttention)
    forward.check(forward.run(backend), backend.pool)


@on_each_device
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", [TritonAttention, VanillaAttention, BatchInvariantAttention])
@torch.inference_mode()
def test_write_leaves_the_same_keys_and_values_as_run(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    forward = Forward(BATCHES[name], device)
    backend = forward.backend(kind)
    forward.write(backend)
    assert not torch.equal(backend.pool.data.cpu(), forward.pool_data)
    forward.check(None, backend.pool)


CAPTURED = Batch(kv_lens=(4, 300, 17), window=3, padding=1)
REPLAYED = Batch(kv_lens=(150, 3, 299), window=3, padding=1)
SPANS = {"": None, "chunks": KeySpan(149, slides=False), "sliding": KeySpan(140, slides=True)}


@on_each_device
@pytest.mark.parametrize("span", SPANS)
@torch.inference_mode()
def test_a_plan_reads_its_tensors_when_it_runs(span: str, device: str) -> None:
    planned = Forward(replace(CAPTURED, span=SPANS[span]), device)
    other = Forward(replace(REPLAYED, span=SPANS[span]), device, seed=1)
    backend = other.backend(TritonAttention)
    plan = backend.plan(planned.metadata)
    for mine, new in zip(planned.tensors(), other.tensors(), strict=True):
        mine.copy_(new)
    other.check(planned.run(backend, plan), backend.pool)


@pytest.mark.gpu
@pytest.mark.parametrize("span", SPANS)
@torch.inference_mode()
def test_a_captured_forward_can_be_replayed_with_other_lengths_and_pages(span: str) -> None:
    own, others = replace(CAPTURED, span=SPANS[span]), replace(REPLAYED, span=SPANS[span])
    captured, replayed = Forward(own, "cuda"), Forward(others, "cuda", seed=1)
    backend = replayed.backend(TritonAttention)
    captured.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.run(backend)
    for other in (replayed, Forward(own, "cuda", seed=2)):
        backend.pool.data.copy_(other.pool_data)
        for mine, new in zip(captured.tensors(), other.tensors(), strict=True):
            mine.copy_(new)
        graph.replay()
        other.check(output, backend.pool)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_generation_forward_never_waits_for_the_device() -> None:
    forward = Forward(CAPTURED, "cuda")
    backend = forward.backend(TritonAttention)
    expected = forward.run(backend)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = forward.run(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(output, expected)
