"""Copies of KV pages between device and host memory, next to the rounds.

On CUDA the host's memory is pinned and the slow part, over PCIe, runs on a stream of its own, from
or to a buffer on the device. The rounds' stream only copies between buffer and page, and waits for
a page that comes back."""

from collections.abc import Sequence

import torch

from tllm_spec.attention.kv_pool import KVPool


class HostCopies:
    """groups: the pools of each layer group, whose pages have the same numbers."""

    def __init__(self, groups: Sequence[Sequence[KVPool]], num_places: int) -> None:
        self._groups = groups
        device = groups[0][0].data.device
        self._side = _new_stream(device) if device.type == "cuda" else None
        self._host = [
            [
                torch.empty(
                    (num_places, *pool.page(0).shape),
                    dtype=pool.data.dtype,
                    pin_memory=self._side is not None,
                )
                for pool in pools
            ]
            for pools in groups
        ]

    def save(self, pages: Sequence[int], place: int) -> None:
        for pools, hosts, page in zip(self._groups, self._host, pages, strict=True):
            for pool, host in zip(pools, hosts, strict=True):
                self._to_host(pool.page(page), host[place])

    def load(self, place: int, pages: Sequence[int]) -> None:
        for pools, hosts, page in zip(self._groups, self._host, pages, strict=True):
            for pool, host in zip(pools, hosts, strict=True):
                self._to_device(host[place], pool.page(page))

    def _to_host(self, page: torch.Tensor, host: torch.Tensor) -> None:
        if self._side is None:
            host.copy_(page)
            return
        # `contiguous` would make no copy of a page of one layer's latents, which is contiguous.
        buffer = page.clone(memory_format=torch.contiguous_format)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host.copy_(buffer, non_blocking=True)
        buffer.record_stream(self._side)

    def _to_device(self, host: torch.Tensor, page: torch.Tensor) -> None:
        if self._side is None:
            page.copy_(host)
            return
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self._side):  # also after the copy that filled the place
            buffer = host.to(page.device, non_blocking=True)
        main.wait_stream(self._side)
        buffer.record_stream(main)
        page.copy_(buffer)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
    return stream
