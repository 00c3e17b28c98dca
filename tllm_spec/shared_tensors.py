"""Tensors that another process of this machine has in shared memory or on a GPU, described in JSON.

They are copied one after another. No description can make this process run code."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tllm_spec.config.config_base import ConfigModel, check

if TYPE_CHECKING:
    import torch

    # From an offset on, so many bytes.
    Read = Callable[[int, int], torch.Tensor]

FOLDER = Path("/dev/shm")  # where Linux has POSIX shared memory
Size = Annotated[int, Field(ge=0, lt=1 << 48)]
DType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int32"]


class NamedTensor(ConfigModel):
    """offset: its first byte, from the start of the memory. It is contiguous."""

    name: str
    dtype: DType
    shape: Annotated[list[Size], Field(max_length=8)]
    offset: Size = 0


class SharedTensors(ConfigModel):
    """shared_memory: the name of POSIX shared memory. cuda_handle: of CUDA memory on `device`, as
    `cuIpcGetMemHandle` gives it, in hexadecimal digits; `pid`: the process that has it."""

    named_tensors: list[NamedTensor] = Field(default_factory=list)
    serialized_named_tensors: Any = None
    shared_memory: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] | None = None
    cuda_handle: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")] | None = None
    device: Size = 0
    pid: Annotated[int, Field(ge=1)] | None = None

    @check
    def _check_memory(self) -> Iterator[str]:
        if self.serialized_named_tensors is not None:
            yield "serialized_named_tensors are pickles, which run code: send named_tensors"
        elif not self.named_tensors:
            yield "named_tensors is needed: at least one tensor"
        if (self.shared_memory is None) == (self.cuda_handle is None):
            yield "either shared_memory or cuda_handle is needed"
        if (self.cuda_handle is None) != (self.pid is None):
            yield "cuda_handle and pid need each other"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and copies. Raises ValueError, before any is read, for memory of another user, for
        a tensor that ends after the memory's end, and for more bytes than this machine has free:
        memory may be said to be larger than it is, and tensors may overlap."""
        import torch

        from tllm_spec.executor.engine.memory_plan import free_bytes

        types = [getattr(torch, each.dtype) for each in self.named_tensors]
        sizes = [
            prod(each.shape) * dtype.itemsize
            for each, dtype in zip(self.named_tensors, types, strict=True)
        ]
        with self._opened() as (num_bytes, read):
            for each, size in zip(self.named_tensors, sizes, strict=True):
                if each.offset + size > num_bytes:
                    end = each.offset + size
                    raise ValueError(f"{each.name} ends at byte {end}; the memory has {num_bytes}")
            if sum(sizes) > (free := free_bytes(torch.device("cpu"))):
                raise ValueError(f"the tensors have {sum(sizes)} bytes; {free} are free here")
            for each, dtype, size in zip(self.named_tensors, types, sizes, strict=True):
                yield each.name, read(each.offset, size).view(dtype).view(each.shape)

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, Read]]:
        """The memory's number of bytes, and what reads it."""
        if self.shared_memory is not None:
            with _shared_memory(self.shared_memory) as opened:
                yield opened
            return
        assert self.cuda_handle is not None
        holder = Path(f"/proc/{self.pid}")
        if not holder.is_dir() or holder.stat().st_uid != os.geteuid():
            raise ValueError(f"pid = {self.pid} is not a process of this server's user")
        with _cuda_memory(bytes.fromhex(self.cuda_handle), self.device) as opened:
            yield opened


@contextmanager
def _shared_memory(name: str) -> Iterator[tuple[int, Read]]:
    import torch

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    try:
        file = open(FOLDER / name, "rb", buffering=0, opener=opener)  # noqa: SIM115 # closed below
    except OSError as error:
        raise ValueError(f"shared_memory = {name!r} cannot be read: {error.strerror}") from error
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"shared_memory = {name!r} is not memory of this server's user")

        def read(offset: int, size: int) -> torch.Tensor:
            data = torch.empty(size, dtype=torch.uint8)
            file.seek(offset)
            left = data.numpy().data
            while left:
                if not (number := file.readinto(left)):
                    raise ValueError(f"shared_memory = {name!r} has become shorter")
                left = left[number:]
            return data

        yield found.st_size, read


@contextmanager
def _cuda_memory(data: bytes, device: int) -> Iterator[tuple[int, Read]]:
    import torch

    if device >= torch.cuda.device_count():
        raise ValueError(f"device = {device}: there are {torch.cuda.device_count()} GPUs")
    from cuda.bindings import driver

    from tllm_spec.kernels.nvrtc import checked

    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), data, len(data))
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value

    def read(offset: int, size: int) -> torch.Tensor:
        own = {"shape": (size,), "typestr": "|u1", "data": (start + offset, False), "version": 3}
        array = SimpleNamespace(__cuda_array_interface__=own)
        return torch.as_tensor(array, device=f"cuda:{device}").clone()

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context the current one
        try:
            start = int(checked(driver.cuIpcOpenMemHandle(handle, flags)))
        except RuntimeError as error:
            raise ValueError(f"cuda_handle cannot be opened: {error}") from error
        try:
            _, _, size = driver.cuMemGetAddressRange(start)
            yield int(size), read
        finally:
            checked(driver.cuIpcCloseMemHandle(start))
