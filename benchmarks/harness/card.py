"""What the GPU at hand reaches, for floors that bind on any GPU."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness.models import MATMUL_FLOPS, READ_BYTES_PER_S

COPIED_BYTES, MATMUL_SIZE, CALLS = 1 << 30, 8192, 10


@dataclass(frozen=True)
class Card:
    """Bytes read and written in a second by a large copy, and operations in a second of a large
    GEMM in bfloat16."""

    bytes_per_s: float
    flops: float


@functools.cache
def card(device: str) -> Card:
    """Measured; on a CPU, whose figures say nothing, those of an H200."""
    if device != "cuda":
        return Card(READ_BYTES_PER_S, MATMUL_FLOPS)
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source))
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=device)
    return Card(2 * COPIED_BYTES / copy_s, 2 * MATMUL_SIZE**3 / _seconds(lambda: x @ x))


def _seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS / 1e3
