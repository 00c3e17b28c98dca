"""Ranks that are processes of this machine, in tests of kernels that wait for each other. They
share tensors in shared memory."""

import multiprocessing
from collections.abc import Callable

import torch


def run_at_once(ranks: int, run: Callable[[int], None]) -> None:
    """`run` of each rank, in a fork of this process. A rank that fails or waits too long fails the
    test."""

    def alone(rank: int) -> None:
        torch.set_num_threads(1)  # a fork has no threads of its parent's pool
        run(rank)

    processes = multiprocessing.get_context("fork")
    running = [processes.Process(target=alone, args=(rank,), daemon=True) for rank in range(ranks)]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
        assert each.exitcode == 0
