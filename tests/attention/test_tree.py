"""Draft trees in every backend: each row equals plain attention over its own path. Also under
Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

import pytest
import torch

from tests.attention.plain_prefill import PlainPrefill
from tests.attention.test_triton import (
    GEOMETRY,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    Batch,
    Forward,
    on_each_device,
)
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.interface import AttentionBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.attention.visible_keys import TreeMask

# A batch, and the keys of the tree's region before the windows.
BATCHES = {
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
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "kind", [VanillaAttention, TritonAttention, FlashInferAttention, BatchInvariantAttention]
)
@torch.inference_mode()
def test_each_row_attends_to_its_own_path_and_chunks_stay_causal(
    kind: type[AttentionBackend], name: str, device: str
) -> None:
    forward = TreeForward(*BATCHES[name], device)
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
    batch = BATCHES["a later draft step"]
    captured, other = TreeForward(*batch, "cuda"), TreeForward(*batch, "cuda", seed=1)
    assert captured.paths != other.paths
    backend = other.backend(kind)
    captured.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.run(backend)
    backend.pool.data.copy_(other.pool_data)
    for mine, new in zip(captured.tensors(), other.tensors(), strict=True):
        mine.copy_(new)
    graph.replay()
    other.check(output, backend.pool)
