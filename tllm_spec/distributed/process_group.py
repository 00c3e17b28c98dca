"""The communicator of several processes: MPI for plain data, torch.distributed for tensors (NCCL on
CUDA, gloo on a CPU)."""

from __future__ import annotations

import socket
from datetime import timedelta
from time import sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tllm_spec.distributed.communicator import Communicator
from tllm_spec.distributed.mapping import Mapping

if TYPE_CHECKING:
    from mpi4py import MPI

START_TIMEOUT = timedelta(seconds=120)
MESSAGE_TAG = 1
SPINS = 10_000  # about 5 ms of polling; then the waiting rank sleeps in between
SLEEP_SECONDS = 0.0002


class ProcessGroup(Communicator):
    """One rank of `comm`, all of whose ranks serve one model with tensor parallelism. Tensors can
    be sent after `join`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.mapping = Mapping(comm.rank, comm.size, comm.size)

    def broadcast(self, message: bytes) -> bytes:
        """A waiting rank does not keep a processor busy for long, as MPI's own broadcast would."""
        if self.mapping.rank == 0:
            for rank in range(1, self.mapping.world_size):
                self._comm.Send(bytearray(message), dest=rank, tag=MESSAGE_TAG)
            return message
        from mpi4py import MPI

        status, num_polls = MPI.Status(), 0
        while not self._comm.Iprobe(source=0, tag=MESSAGE_TAG, status=status):
            num_polls += 1
            if num_polls > SPINS:
                sleep(SLEEP_SECONDS)
        buffer = bytearray(status.Get_count())
        self._comm.Recv(buffer, source=0, tag=MESSAGE_TAG)
        return bytes(buffer)

    def minimum(self, number: int) -> int:
        from mpi4py import MPI

        return int(self._comm.allreduce(number, MPI.MIN))

    def all_reduce(self, values: torch.Tensor) -> None:
        dist.all_reduce(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        number, (rows, columns) = self.mapping.tp_size, values.shape
        gathered = values.new_empty((number * rows, columns))
        dist.all_gather_into_tensor(gathered, values.contiguous())
        return gathered.view(number, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast_tensor(self, values: torch.Tensor) -> None:
        dist.broadcast(values, 0)

    def join(self, device: torch.device) -> None:
        """Connects the ranks' devices, through a store of rank 0 on a free port of its host."""
        stores, store = _stores(), None
        if self.mapping.rank == 0:  # listens on all interfaces, for ranks on other hosts
            store = stores("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        address = (socket.gethostname(), store.port) if store is not None else None
        host, port = self._comm.bcast(address)
        if store is None:
            store = stores(host, port, is_master=False, timeout=START_TIMEOUT)
        place = self.mapping.rank, self.mapping.world_size
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=place[0], world_size=place[1])

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        self._comm.Abort(1)


def _stores() -> Any:
    """torch's store over TCP, which its type annotations do not export."""
    return getattr(dist, "TCPStore")  # noqa: B009 # the attribute is not exported
