"""How long work takes that no graph holds, as it would in a round: launched and done."""

from collections.abc import Callable
from time import perf_counter

import torch

TIMED_RUNS = 4  # the first may compile
TIMED_KV_LEN = 512  # the KV length that attention is planned for


def eager_seconds(run: Callable[[], torch.Tensor]) -> float:
    """The fastest of a few runs, each until its result is on the host: other work on the machine
    only adds time."""
    times = []
    for _ in range(TIMED_RUNS):
        start = perf_counter()
        run().tolist()
        times.append(perf_counter() - start)
    return min(times)
