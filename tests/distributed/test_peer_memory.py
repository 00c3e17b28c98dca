"""All ranks get each other's memory or none does; a stand-in takes the place of CUDA's driver."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from enum import Enum

import pytest
import torch

from tests.distributed.thread_ranks import ThreadGroup
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.distributed.peer_sums import NO_DRIVER, NoPeerMemory, PeerMemory

pytest.importorskip("cuda.bindings")
CPU = torch.device("cpu")
STEPS = ["cuMemAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"]


class Code(Enum):
    SUCCESS = 0
    NO_PEER_ACCESS = 217


class Handle:
    def __init__(self) -> None:
        self.data = (ctypes.c_char * 64)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class Driver:
    """cuda.bindings.driver, with its names. Addresses are multiples of 100, and one more where they
    are opened. `fails`: the call that does on one rank."""

    CU_IPC_HANDLE_SIZE, CUipcMemHandle = 64, Handle

    class CUipcMem_flags(Enum):
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1

    def __init__(self) -> None:
        self.fails: tuple[str, int] = ("", 0)
        self.here, self.lock = threading.local(), threading.Lock()
        self.zeroed, self.freed, self.opened = list[tuple[int, int]](), list[int](), Counter[int]()

    def _code(self, name: str) -> Code:
        return Code.NO_PEER_ACCESS if self.fails == (name, self.here.rank) else Code.SUCCESS

    def cuMemAlloc(self, num_bytes: int) -> tuple[Code, int]:
        return self._code("cuMemAlloc"), 100 * (1 + self.here.rank)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> tuple[Code]:
        assert value == 0
        self.zeroed.append((address, num_bytes))
        return (Code.SUCCESS,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Code, Handle]:
        handle = Handle()
        handle.data.raw = address.to_bytes(8, "little").ljust(64, b"\0")
        return self._code("cuIpcGetMemHandle"), handle

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Code, int]:
        address = int.from_bytes(handle.data.raw[:8], "little")
        if (code := self._code("cuIpcOpenMemHandle")) is Code.SUCCESS:
            with self.lock:
                self.opened[address] += 1
        return code, address + 1

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Code]:
        with self.lock:
            self.opened[address - 1] -= 1
        return (Code.SUCCESS,)

    def cuMemFree(self, address: int) -> tuple[Code]:
        assert not self.opened[address], "a rank has it open"
        self.freed.append(address)
        return (Code.SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr("cuda.bindings.driver", found, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_each_rank_has_the_others_memory_and_frees_its_own_once_no_rank_has_it_open(
    driver: Driver,
) -> None:
    def work(communicator: Communicator) -> list[int]:
        driver.here.rank = communicator.mapping.rank
        memory = PeerMemory(1000, CPU, communicator)
        found = list(memory.addresses)
        memory.close()
        return found

    assert ThreadGroup().run(work) == [[100, 201], [101, 200]]
    assert sorted(driver.zeroed) == [(100, 1000), (200, 1000)]
    assert sorted(driver.freed) == [100, 200]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_is_refused_on_all_and_nothing_stays(
    step: str, rank: int, driver: Driver
) -> None:
    driver.fails = (step, rank)

    def work(communicator: Communicator) -> str:
        driver.here.rank = communicator.mapping.rank
        with pytest.raises(NoPeerMemory) as refused:
            PeerMemory(1000, CPU, communicator)
        return str(refused.value)

    assert ThreadGroup().run(work) == ["Code: NO_PEER_ACCESS"] * 2
    allocated = {100, 200} - ({100 * (1 + rank)} if step == "cuMemAlloc" else set())
    assert set(driver.freed) == allocated and not any(driver.opened.values())


def test_without_cuda_python_on_one_rank_all_are_refused_and_nothing_is_allocated(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tllm_spec.distributed.peer_sums.is_installed", lambda: driver.here.rank == 0
    )

    def work(communicator: Communicator) -> str:
        driver.here.rank = communicator.mapping.rank
        with pytest.raises(NoPeerMemory) as refused:
            PeerMemory(1000, CPU, communicator)
        return str(refused.value)

    assert ThreadGroup().run(work) == [NO_DRIVER] * 2
    assert not driver.zeroed and not driver.freed
