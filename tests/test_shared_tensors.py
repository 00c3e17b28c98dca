"""Tensors of another process are copied, and what a description says of its memory is checked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def tensor(shape: list[int], offset: int = 0, dtype: str = "float32") -> Any:
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


@contextmanager
def memory_of(num_bytes: int) -> Iterator[str]:
    """The name of shared memory that says it has so many bytes, and has none yet."""
    name = f"tllm-test-{os.getpid()}"
    with (FOLDER / name).open("wb") as file:
        file.truncate(num_bytes)
    try:
        yield name
    finally:
        (FOLDER / name).unlink()


def refusal(**given: Any) -> str:
    with pytest.raises(ValueError) as caught:
        list(SharedTensors(**given).tensors())
    return str(caught.value)


def test_memory_that_says_it_is_larger_than_the_machine_is_not_read() -> None:
    with memory_of(1 << 45) as name:
        own = {"shared_memory": name, "named_tensors": [tensor([1 << 43])]}
        assert f"the tensors have {1 << 45} bytes; " in refusal(**own)
        overlapping = {"named_tensors": [tensor([1 << 30])] * 1024}
        assert f"the tensors have {1 << 42} bytes; " in refusal(**own | overlapping)
        assert f"x ends at byte {(1 << 45) + 4}" in refusal(
            shared_memory=name, named_tensors=[tensor([1], 1 << 45)]
        )


def test_what_is_no_shared_memory_is_refused_and_leaves_no_open_file() -> None:
    """A folder, a pipe, a symbolic link, and no file."""
    named = [tensor([1])]
    paths = [FOLDER / f"tllm-test-{os.getpid()}-{kind}" for kind in ("folder", "pipe", "link")]
    folder, pipe, link = paths
    num_open = len(os.listdir("/proc/self/fd"))
    try:
        folder.mkdir()
        os.mkfifo(pipe)
        link.symlink_to("/etc/hostname")
        found = [refusal(shared_memory=path.name, named_tensors=named) for path in paths]
    finally:
        link.unlink(missing_ok=True)
        pipe.unlink(missing_ok=True)
        folder.rmdir()
    assert ["Is a directory" in found[0], "is not memory" in found[1]] == [True] * 2
    assert "symbolic links" in found[2]
    assert "No such file" in refusal(shared_memory="tllm-none", named_tensors=named)
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"shared_memory": "../etc/passwd"}, "shared_memory"),
        ({"shared_memory": ".."}, "shared_memory"),
        ({"shared_memory": "x\n"}, "shared_memory"),
        ({"shared_memory": "x", "named_tensors": [tensor([-1])]}, "shape"),
        ({"shared_memory": "x", "named_tensors": [tensor([1], -4)]}, "offset"),
        ({"shared_memory": "x", "named_tensors": [tensor([1], dtype="object")]}, "dtype"),
        ({"shared_memory": "x", "serialized_named_tensors": "gASV"}, "are pickles"),
        ({"cuda_handle": "0" * 128}, "cuda_handle and pid need each other"),
        ({"cuda_handle": "0" * 128, "pid": 1 << 30}, "is not a process of this server's user"),
        ({}, "either shared_memory or cuda_handle is needed"),
    ],
)
def test_a_description_that_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    assert why in refusal(**{"named_tensors": [tensor([1])]} | given)
