"""Memory whose pages go back to the system while an engine sleeps, and whose addresses stay: then
tensors and captured CUDA graphs are valid when it wakes up.

On CUDA it is made with the driver's virtual memory (`cuMemAddressReserve`, `cuMemCreate`,
`cuMemMap`) and torch takes it as an array of bytes. On a CPU it is an anonymous mapping."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tllm_spec.kernels.nvrtc import checked

MOVED_AT_ONCE = 1 << 30  # bytes: `place` needs as much memory in addition
ALIGNMENT = 256  # bytes


class HostMemory:
    """Anonymous memory of a CPU. Its pages are zeroed whenever they come."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, num_bytes, flags=flags)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Gives the pages back."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """They come by themselves."""


class LockedMemory(HostMemory):
    """Host memory that a CUDA device reads and writes by itself: copies are several times as
    fast."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        runtime, address = torch.cuda.cudart(), self.bytes.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
        # Before the mapping ends. At the end of the process both end by themselves.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


class VirtualRange:
    """A range of a device's addresses. torch's tensors over it hold it, so it is freed with the
    last of them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        torch.cuda.synchronize(device)  # torch makes the context that the driver works in
        self._driver, self._device = driver, device
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device.index
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(checked(driver.cuMemGetAllocationGranularity(self._kind, unit)))
        self.num_bytes = -(-num_bytes // step) * step
        self._address = checked(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0))
        self._mapped: list[bool] = []  # not empty while it has memory
        own = driver, device, self._address, self.num_bytes, self._mapped
        # The end of the process frees everything by itself.
        weakref.finalize(self, _free, *own).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = int(self._address), False
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": place, "version": 3}

    def map(self) -> None:
        """Raises RuntimeError if the device has too little memory."""
        if self._mapped:
            return
        size = self.num_bytes
        handle = checked(self._driver.cuMemCreate(size, self._kind, 0))
        try:
            checked(self._driver.cuMemMap(self._address, size, 0, handle, 0))
        finally:  # the mapping holds the memory
            checked(self._driver.cuMemRelease(handle))
        self._mapped.append(True)
        checked(self._driver.cuMemSetAccess(self._address, size, [self._access], 1))

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)
        checked(self._driver.cuMemUnmap(self._address, self.num_bytes))
        self._mapped.clear()


def _free(
    driver: Any, device: torch.device, address: Any, num_bytes: int, mapped: list[bool]
) -> None:
    if mapped:
        torch.cuda.synchronize(device)
        checked(driver.cuMemUnmap(address, num_bytes))
    checked(driver.cuMemAddressFree(address, num_bytes))


class DeviceMemory:
    """Memory of a CUDA device. Its pages are zeroed whenever they come."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._range = VirtualRange(num_bytes, device)
        self._range.map()
        self.bytes = torch.as_tensor(self._range, device=device)
        self.bytes.zero_()

    def release(self) -> None:
        self._range.unmap()

    def restore(self) -> None:
        """Raises RuntimeError if the device has too little memory."""
        self._range.map()
        self.bytes.zero_()


class SleepingMemory:
    """Memory by tag. A tag is asleep between `release` and `restore`."""

    def __init__(self, device: torch.device, *, is_locked: bool = False) -> None:
        """is_locked: of a CPU's memory, as `LockedMemory` says."""
        self._device, self._is_locked = device, is_locked
        self._pages: dict[str, list[HostMemory | DeviceMemory]] = {}
        # What sleeping tags had. On CUDA this host memory stays for the next time: to lock it takes
        # longer than to copy.
        self._kept: dict[str, list[HostMemory]] = {}

    def num_bytes(self, *tags: str) -> int:
        return sum(each.bytes.nbytes for tag in tags for each in self._pages.get(tag, []))

    @property
    def kept_bytes(self) -> int:
        """Host memory that keeps what sleeping tags had."""
        return sum(each.bytes.nbytes for kept in self._kept.values() for each in kept)

    def take(self, tag: str, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8, zeros."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what torch holds without need is memory that others lack
            pages: HostMemory | DeviceMemory = DeviceMemory(num_bytes, self._device)
        else:
            pages = LockedMemory(num_bytes) if self._is_locked else HostMemory(num_bytes)
        self._pages.setdefault(tag, []).append(pages)
        return pages.bytes[:num_bytes]

    def place(self, tag: str, tensors: Iterable[torch.Tensor]) -> None:
        """Moves the storages of tensors of this device here; the tensors stay the same objects. No
        other tensor may have one of these storages. What is here already stays."""
        here = {each.bytes.data_ptr() for pages in self._pages.values() for each in pages}
        by_storage: dict[int, list[torch.Tensor]] = {}
        for each in tensors:
            if each.device == self._device and each.layout is torch.strided and each.numel():
                by_storage.setdefault(each.untyped_storage().data_ptr(), []).append(each)
        batch: list[list[torch.Tensor]] = []
        for address, own in by_storage.items():
            if address in here:
                continue
            if batch and _size_of([*batch, own]) > MOVED_AT_ONCE:
                self._move(tag, batch)
                batch = []
            batch.append(own)
        if batch:
            self._move(tag, batch)

    @torch.inference_mode()
    def _move(self, tag: str, storages: list[list[torch.Tensor]]) -> None:
        """storages: the tensors of each."""
        memory, start = self.take(tag, _size_of(storages)), 0
        for tensors in storages:
            old = tensors[0].untyped_storage()
            values = memory.new_empty(0).set_(old)
            memory[start : start + len(values)].copy_(values)
            for each in tensors:
                first = start // each.element_size() + each.storage_offset()
                each.set_(memory.untyped_storage(), first, each.shape, each.stride())
            start += _aligned(old.nbytes())

    @torch.inference_mode()
    def release(self, tag: str, *, keep: bool) -> None:
        """keep: what is there, in host memory. Called between two rounds."""
        pages = self._pages.get(tag, [])
        if not keep:
            self.forget(tag)
        elif tag not in self._kept:
            kind = LockedMemory if self._device.type == "cuda" else HostMemory
            self._kept[tag] = [kind(each.bytes.nbytes) for each in pages]
        for each, kept in zip(pages, self._kept.get(tag, []), strict=False):
            kept.bytes.copy_(each.bytes)
        for each in pages:
            each.release()

    def forget(self, tag: str) -> None:
        """Drops what is kept of a tag."""
        self._kept.pop(tag, None)

    @torch.inference_mode()
    def restore(self, tag: str) -> None:
        """What was not kept is zeros. Raises RuntimeError, and may be called again, if the device
        has too little memory."""
        pages = self._pages.get(tag, [])
        for each in pages:
            each.restore()
        for each, kept in zip(pages, self._kept.get(tag, []), strict=False):
            each.bytes.copy_(kept.bytes)
        if self._device.type == "cpu":
            self.forget(tag)


def _size_of(storages: Iterable[list[torch.Tensor]]) -> int:
    """Bytes. storages: the tensors of each."""
    return sum(_aligned(tensors[0].untyped_storage().nbytes()) for tensors in storages)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
