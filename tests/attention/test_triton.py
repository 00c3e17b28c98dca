"""TRITON and batch-invariant attention equal VANILLA, and each row of a draft tree equals plain
attention over its own path: with the kernels' plain-torch references, with the kernels under
Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

from dataclasses import replace

import pytest
import torch

from tests.attention.batches import Batch, Forward, TreeForward, on_each_device
from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.row_counts import rows_of
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.attention.interface import HeadsBackend
from tllm_spec.attention.triton import TritonAttention
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.dispatch import has_kernels

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


@pytest.mark.covering
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


@pytest.mark.covering
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


@pytest.mark.covering
@on_each_device
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(
    "kind", [VanillaAttention, TritonAttention, FlashInferAttention, BatchInvariantAttention]
)
@torch.inference_mode()
def test_each_row_attends_to_its_own_path_and_chunks_stay_causal(
    kind: type[HeadsBackend], name: str, device: str
) -> None:
    forward = TreeForward(*TREES[name], device)
    backend = forward.backend(kind)
    output = forward.run(backend)
    torch.testing.assert_close(output, forward.formula(backend.pool), rtol=1e-4, atol=1e-4)
    forward.check(output, backend.pool)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TritonAttention, BatchInvariantAttention])
@torch.inference_mode()
def test_a_captured_forward_can_be_replayed_with_other_trees(kind: type[HeadsBackend]) -> None:
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
