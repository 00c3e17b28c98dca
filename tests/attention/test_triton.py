"""TRITON and batch-invariant attention equal VANILLA, and each row of a draft tree equals plain
attention over its own path: with the kernels' plain-torch references, with the kernels under
Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.attention.plain_prefill import PlainPrefill
from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    HeadsBackend,
)
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.attention.visible_keys import KeySpan, TreeMask
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
    # A tile of batch-invariant attention has 21 tokens.
    "tiles of chunks and windows": Batch(((9, 24), (0, 3)), (30, 45), window=22),
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
@pytest.mark.parametrize("kind", [TritonAttention, BatchInvariantAttention])
@torch.inference_mode()
def test_every_kind_of_batch_equals_vanilla(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    assert has_kernels(torch.device(device)) == (INTERPRETED or device == "cuda")
    forward = Forward(BATCHES[name], device)
    backend = forward.backend(kind)
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
    copy_all(planned.tensors(), other.tensors())
    other.check(planned.run(backend, plan), backend.pool)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "span"), [(BatchInvariantAttention, ""), *((TritonAttention, span) for span in SPANS)]
)
@torch.inference_mode()
def test_a_captured_forward_can_be_replayed_with_other_lengths_and_pages(
    kind: type[HeadsBackend], span: str
) -> None:
    own, others = replace(CAPTURED, span=SPANS[span]), replace(REPLAYED, span=SPANS[span])
    captured, replayed = Forward(own, "cuda"), Forward(others, "cuda", seed=1)
    backend = replayed.backend(kind)
    graph, output = captured_graph(lambda: captured.run(backend))
    for other in (replayed, Forward(own, "cuda", seed=2)):
        backend.pool.data.copy_(other.pool_data)
        copy_all(captured.tensors(), other.tensors())
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


# A batch, and the keys of the tree's region before the windows.
TREES = {
    "a whole tree": (Batch(kv_lens=(6, 17, 300), window=6), 0),
    "a later draft step": (Batch(kv_lens=(9, 80), window=3), 6),
    "one beam": (Batch(kv_lens=(5, 80), window=1), 4),
    "64 keys": (Batch(kv_lens=(64, 100), window=2), 62),
    "chunks and trees": (Batch(((0, 9), (7, 5)), (8, 33), window=5), 3),
    "trees of their own": (Batch((), (40, 300, 17, 6), counts=(1, 22, 3, 6)), 0),
    "chunks and such trees": (Batch(((0, 9),), (8, 33, 70), counts=(3, 1, 5)), 0),
}


class TreeForward(Forward):
    """The windows are the last rows of a random tree, another one for each request."""

    def __init__(self, batch: Batch, offset: int, device: str, seed: int = 0) -> None:
        super().__init__(batch, device, seed)
        self.chain = Forward(batch, device, seed)
        counts = batch.counts or (batch.window,) * len(batch.kv_lens)
        generator, rows = torch.Generator().manual_seed(seed), self.metadata.rows
        self.paths = [random_paths(offset + count, generator)[offset:] for count in counts]
        self.kv_lens = batch.kv_lens
        self.firsts = [n - offset - count for n, count in zip(batch.kv_lens, counts, strict=True)]
        self.num_rows = sum(counts)
        bits = torch.tensor([each for own in self.paths for each in bits_of(own)], device=device)
        part = rows if batch.counts else None
        bits = bits if batch.counts else bits.view(len(counts), -1)
        self.metadata.tree = TreeMask(bits, offset + rows.window, part)
        depths = [
            first + len(path) - 1
            for first, paths in zip(self.firsts, self.paths, strict=True)
            for path in paths
        ]
        self.metadata.positions[-self.num_rows :] = torch.tensor(depths, device=device)

    def backend(self, kind: type[AttentionBackend]) -> AttentionBackend:
        backend = super().backend(kind if kind is not FlashInferAttention else VanillaAttention)
        if kind is not FlashInferAttention:
            return backend
        return FlashInferAttention(GEOMETRY, backend.pool, PlainPrefill(GEOMETRY))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self.metadata.tree is not None
        return *super().tensors(), self.metadata.tree.bits

    def expected(self, backend: AttentionBackend) -> torch.Tensor:
        """The windows' rows, `[B * W, Hq * D]`. It reads the keys and values that `backend` left in
        its pool."""
        qkv = self.qkv.clone()
        plain_rotate(qkv[:, :-KV_HEADS], Rotary(self.table, self.metadata.positions), None)
        queries = iter(qkv[-self.num_rows :, :HEADS])
        pool = backend.pool.data[1].flatten(1, 2)
        results = []
        requests = len(self.kv_lens)
        for paths, first, table in zip(
            self.paths, self.firsts, self.metadata.block_tables[-requests:], strict=True
        ):
            for path in paths:
                seen = [*range(first), *(first + key for key in path)]
                slots = [int(table[i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in seen]
                keys, values = pool[:, slots].repeat_interleave(HEADS // KV_HEADS, dim=2)
                scores = torch.einsum("hd,lhd->hl", next(queries), keys) * GEOMETRY.scale
                results.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values).flatten())
        return torch.stack(results)


@on_each_device
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(
    "kind", [VanillaAttention, TritonAttention, FlashInferAttention, BatchInvariantAttention]
)
@torch.inference_mode()
def test_each_row_attends_to_its_own_path_and_chunks_stay_causal(
    kind: type[AttentionBackend], name: str, device: str
) -> None:
    forward = TreeForward(*TREES[name], device)
    backend = forward.backend(kind)
    output = forward.run(backend)
    windows = output[-forward.num_rows :]
    torch.testing.assert_close(windows, forward.expected(backend), rtol=1e-4, atol=1e-4)
    chunks = forward.chain.run(forward.chain.backend(VanillaAttention))[: -forward.num_rows]
    torch.testing.assert_close(output[: -forward.num_rows], chunks, rtol=1e-4, atol=1e-4)
    forward.check(output, backend.pool)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TritonAttention, BatchInvariantAttention])
@torch.inference_mode()
def test_a_captured_forward_can_be_replayed_with_other_trees(kind: type[AttentionBackend]) -> None:
    batch = TREES["a later draft step"]
    captured, other = TreeForward(*batch, "cuda"), TreeForward(*batch, "cuda", seed=1)
    assert captured.paths != other.paths
    backend = other.backend(kind)
    graph, output = captured_graph(lambda: captured.run(backend))
    backend.pool.data.copy_(other.pool_data)
    copy_all(captured.tensors(), other.tensors())
    graph.replay()
    other.check(output, backend.pool)


def test_tiles_hold_every_row_once_at_its_position() -> None:
    kv_lens = torch.tensor([30, 9], dtype=torch.int32)
    parts = [
        QueryTiles.of_chunk(0, 100, 7, 0, 3, torch.device("cpu")),
        QueryTiles.of_windows(7, kv_lens, rows_of([5, 5]), 1, 3),
    ]
    tiles = QueryTiles.joined(parts)
    assert (
        tiles.max_tokens == 3 and tiles.table.is_contiguous() and tiles.table.dtype == torch.int32
    )
    assert tiles.table.t().tolist() == [
        [0, 100, 3, 0],
        [3, 103, 3, 0],
        [6, 106, 1, 0],
        [7, 25, 3, 1],
        [10, 28, 2, 1],
        [12, 4, 3, 2],
        [15, 7, 2, 2],
    ]
    tiles = QueryTiles.of_windows(7, kv_lens, rows_of([5, 1]), 1, 3)
    assert [row for row in tiles.table.t().tolist() if row[2]] == [
        [7, 25, 3, 1],
        [10, 28, 2, 1],
        [12, 8, 1, 2],
    ]
