"""CUDA graphs in tests of what a replay reads."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured_graph(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `call`, which runs once before and compiles its kernels, and what it returned."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def copy_all(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """What a replay reads gets new values."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
