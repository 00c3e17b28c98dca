"""The communicator of several processes: MPI for plain data, torch.distributed for tensors (NCCL on
CUDA, gloo on a CPU)."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tllm_spec.distributed.communicator import Communicator
from tllm_spec.distributed.mapping import Mapping

if TYPE_CHECKING:
    from mpi4py import MPI

START_TIMEOUT = timedelta(seconds=120)


class ProcessGroup(Communicator):
    """One rank of `comm`, all of whose ranks serve one model with tensor parallelism."""

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self.mapping = Mapping(comm.rank, comm.size, comm.size)
        self._group = self._join()

    def broadcast(self, message: bytes) -> bytes:
        length = self._comm.bcast(len(message))  # an integer, so nothing is unpickled from outside
        buffer = bytearray(message if self.mapping.rank == 0 else length)
        self._comm.Bcast(buffer)
        return bytes(buffer)

    def minimum(self, number: int) -> int:
        from mpi4py import MPI

        return self._comm.allreduce(number, MPI.MIN)

    def all_reduce(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self._group)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        number, (rows, columns) = self.mapping.tp_size, values.shape
        gathered = values.new_empty((number * rows, columns))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=self._group)
        return gathered.view(number, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast_tensor(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0, group=self._group)

    def _join(self) -> dist.ProcessGroup:
        """Every rank connects to a store of rank 0, on a free port of its host."""
        mapping, is_first = self.mapping, self.mapping.rank == 0
        host, store = socket.gethostname(), None
        if is_first:
            store = dist.TCPStore(
                "0.0.0.0", 0, is_master=True, wait_for_workers=False
            )  # ranks may be on other hosts
        port = self._comm.bcast(store.port if store is not None else 0)
        host = self._comm.bcast(host)
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=START_TIMEOUT)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=mapping.rank, world_size=mapping.world_size
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()
