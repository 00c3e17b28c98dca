"""Batch-invariant attention equals VANILLA: with the kernels' plain-torch references, with the
kernels under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

import pytest
import torch

from tests.attention.test_triton import BATCHES, CAPTURED, REPLAYED, Batch, Forward, on_each_device
from tests.kernels.row_counts import rows_of
from tllm_spec.attention.batch_invariant import BatchInvariantAttention
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles

# A tile has 21 tokens.
LONG = {"tiles of chunks and windows": Batch(((9, 24), (0, 3)), (30, 45), window=22)}


@on_each_device
@pytest.mark.parametrize("name", BATCHES | LONG)
@torch.inference_mode()
def test_every_kind_of_batch_equals_vanilla(name: str, device: str) -> None:
    forward = Forward((BATCHES | LONG)[name], device)
    backend = forward.backend(BatchInvariantAttention)
    forward.check(forward.run(backend), backend.pool)


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


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_forward_can_be_replayed_with_other_lengths_and_pages() -> None:
    captured, replayed = Forward(CAPTURED, "cuda"), Forward(REPLAYED, "cuda", seed=1)
    backend = replayed.backend(BatchInvariantAttention)
    captured.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured.run(backend)
    for other in (replayed, Forward(CAPTURED, "cuda", seed=2)):
        backend.pool.data.copy_(other.pool_data)
        for mine, new in zip(captured.tensors(), other.tensors(), strict=True):
            mine.copy_(new)
        graph.replay()
        other.check(output, backend.pool)
