"""Tensors of another process are copied, and what a description says of its memory is checked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tllm_spec.shared_tensors import FOLDER, SharedTensors

# Prints a handle of CUDA memory with the numbers 0 to 999, and holds it until its input ends.
HOLDER = """
import sys
import torch
from cuda.bindings import driver

torch.cuda.init()
torch.cuda.synchronize()
numbers = torch.arange(1000, dtype=torch.float32)
_, start = driver.cuMemAlloc(numbers.nbytes)
driver.cuMemcpyHtoD(start, numbers.data_ptr(), numbers.nbytes)
torch.cuda.synchronize()
_, handle = driver.cuIpcGetMemHandle(start)
print(bytes(handle.reserved).hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def held_memory() -> Iterator[dict[str, Any]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        handle = holder.stdout.readline().strip()
        yield {"cuda_handle": handle, "device": 0, "pid": holder.pid}
        holder.stdin.close()


def tensor(shape: list[int], offset: int = 0, dtype: str = "float32") -> dict[str, Any]:
    return {"name": "x", "dtype": dtype, "shape": shape, "offset": offset}


@pytest.mark.gpu
def test_on_a_gpu_tensors_are_read_from_the_memory_of_another_process() -> None:
    with held_memory() as memory:
        for _ in range(2):
            shared = SharedTensors(named_tensors=[tensor([3, 5], 40)], **memory)
            ((name, found),) = shared.tensors()
            assert name == "x" and found.tolist() == torch.arange(10.0, 25.0).view(3, 5).tolist()
        too_long = SharedTensors(named_tensors=[tensor([1 << 30])], **memory)
        with pytest.raises(ValueError, match="x ends at byte 4294967296; the memory has"):
            list(too_long.tensors())
        wrong = memory | {"cuda_handle": "0" * 128}
        with pytest.raises(ValueError, match="cuda_handle cannot be opened"):
            list(SharedTensors(named_tensors=[tensor([1])], **wrong).tensors())
        assert torch.ones(3, device="cuda").sum().item() == 3  # no error stays
