"""Device memory that all ranks of a host read and write, by CUDA's interprocess handles. torch's
symmetric memory counts what a process has exchanged, so it hangs between an old and a new process:
when a program's second model starts ranks of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tllm_spec.kernels.nvrtc import checked, is_installed

if TYPE_CHECKING:
    from tllm_spec.distributed.communicator import Communicator

Result = TypeVar("Result")
NO_DRIVER = "cuda-python is not installed; pip install 'tllm_spec[cuda]'"


class NoPeerMemory(Exception):
    """One rank cannot reach the others' memory. Raised on every rank."""


class PeerMemory:
    """`num_bytes` zeros on the device of every rank. All ranks make and close it at the same time.

    Attributes:
        addresses: where the memory of each rank is for this rank.

    Raises:
        NoPeerMemory: on all ranks, if one cannot reach another's device, or has no cuda-python.
    """

    def __init__(self, num_bytes: int, device: torch.device, communicator: Communicator) -> None:
        self.addresses: list[int] = []
        self._device, self._communicator = device, communicator
        self._own, self._peers = 0, list[int]()
        self._on_all(_check_driver)
        try:
            handles = self._on_all(lambda: self._export(num_bytes))
            addresses = self._on_all(lambda: self._open(handles))
        except NoPeerMemory:
            self.close()
            raise
        self.addresses = addresses[communicator.mapping.rank]

    def close(self) -> None:
        """Memory is freed once no rank has it open."""
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)
        while self._peers:
            checked(driver.cuIpcCloseMemHandle(self._peers.pop()))
        self._communicator.gather(None)
        if self._own:
            checked(driver.cuMemFree(self._own))
            self._own = 0

    def _export(self, num_bytes: int) -> bytes:
        """The handle of this rank's memory."""
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)  # makes the device's context the current one
        self._own = int(checked(driver.cuMemAlloc(num_bytes)))
        checked(driver.cuMemsetD8(self._own, 0, num_bytes))
        torch.cuda.synchronize(self._device)  # zero before another rank writes
        handle = checked(driver.cuIpcGetMemHandle(self._own))
        return ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)

    def _open(self, handles: list[bytes]) -> list[int]:
        """The addresses of all ranks' memory here."""
        from cuda.bindings import driver

        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        addresses = []
        for rank, data in enumerate(handles):
            if rank == self._communicator.mapping.rank:
                addresses.append(self._own)
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), data, len(data))
            self._peers.append(int(checked(driver.cuIpcOpenMemHandle(handle, flags))))
            addresses.append(self._peers[-1])
        return addresses

    def _on_all(self, work: Callable[[], Result]) -> list[Result]:
        """What every rank's `work` returns, by rank. NoPeerMemory on all if it fails on one."""
        result: Any = None
        problem = ""
        try:
            result = work()
        except RuntimeError as error:
            problem = str(error)
        found = self._communicator.gather([result, problem])
        if problems := [each for _, each in found if each]:
            raise NoPeerMemory(problems[0])
        return [each for each, _ in found]


def _check_driver() -> None:
    if not is_installed():
        raise RuntimeError(NO_DRIVER)
