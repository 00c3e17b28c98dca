"""The communicator of several processes: MPI for plain data, torch.distributed for tensors (NCCL on
CUDA, gloo on a CPU).

When one process ends, all do: what a rank waits for in a round would never come. Each rank keeps a
connection to rank 0, which the kernel closes with the process, so an end is noticed within
milliseconds. A rank that ends in order says so first, and waits for the other end to say the same.
Both ends of a connection say in one line why they end."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgpack
import torch
import torch.distributed as dist

from tllm_spec.distributed.communicator import Collectives, Communicator, Mapping, ThroughHost
from tllm_spec.distributed.peer_sums import NoPeerMemory, PeerSums, choose_sums, graph_seconds
from tllm_spec.kernels.dispatch import has_kernels

if TYPE_CHECKING:
    from mpi4py import MPI


GOODBYE = b"\n"  # an empty line
MAX_REASON = 1000  # characters


class Watch:
    """Notices that another rank has ended. `peers`: connections to other ranks, with what to call
    them. `on_loss` is called once, in a thread of its own, with the first rank that ended without a
    goodbye, and why."""

    def __init__(
        self, peers: Sequence[tuple[str, socket.socket]], on_loss: Callable[[str], None]
    ) -> None:
        self._peers = peers
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._is_over = False
        self._readers = [
            threading.Thread(target=self._read, args=peer, daemon=True) for peer in peers
        ]
        for reader in self._readers:
            reader.start()

    def close(self) -> None:
        """This rank ends in order. Returns when the others have said that they do."""
        self._send(GOODBYE)
        for reader in self._readers:
            reader.join()

    def fail(self, reason: str) -> None:
        """This rank ends because of a failure."""
        with self._lock:
            self._is_over = True
        line = " ".join(reason.split())[:MAX_REASON] or "?"
        self._send(line.encode() + b"\n")

    def _send(self, line: bytes) -> None:
        for _, connection in self._peers:
            try:
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it has ended, too

    def _read(self, name: str, connection: socket.socket) -> None:
        data = b""
        with suppress(OSError):  # a reset connection is a closed one
            while not data.endswith(b"\n") and (piece := connection.recv(1 << 12)):
                data += piece
        if data == GOODBYE:
            return
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        why = f": {data.decode(errors='replace').strip()}" if data else " (its connection closed)"
        self._on_loss(f"{name} has ended{why}")


def accept(listener: socket.socket, token: bytes, number: int) -> list[tuple[int, socket.socket]]:
    """Connections of so many ranks. Others, which do not know the token, are dropped."""
    found: list[tuple[int, socket.socket]] = []
    while len(found) < number:
        connection, _ = listener.accept()
        head = _receive(connection, len(token) + 4)
        if head[:-4] == token:
            found.append((int.from_bytes(head[-4:], "little"), connection))
        else:
            connection.close()
    listener.close()
    return found


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


logger = logging.getLogger(__name__)

START_TIMEOUT = timedelta(seconds=120)
MESSAGE_TAG, FAILURE_TAG = 1, 2
SPINS = 10_000  # about 5 ms of polling; then the waiting rank sleeps in between
SLEEP_SECONDS = 0.0002
AGREE_SECONDS = 3.0  # that ranks wait for the others after an error
LAST_SECONDS = 1.0  # between telling clients of a lost rank and the end of the process
FAILED = 1  # exit status


class ProcessGroup(Communicator):
    """One rank of `comm`, all of whose ranks serve one model with tensor parallelism. Tensors can
    be sent after `join`. `ep_size`: as `Mapping`; rank 0's counts. `started`: what `comm` was
    merged from, if one rank has started the others."""

    def __init__(
        self, comm: MPI.Intracomm, started: MPI.Intercomm | None = None, ep_size: int = 1
    ) -> None:
        self._comm, self._tensors = comm, Collectives()
        self._started = started
        self._peer_sums: PeerSums | None = None
        self.mapping = Mapping(comm.rank, comm.size, comm.size)
        self.mapping = replace(self.mapping, ep_size=self.share(ep_size))
        self._tell: Callable[[str], None] = lambda reason: None
        self._releases: list[Callable[[], None]] = []
        self._hosts = [str(host) for host in self.gather(socket.gethostname())]
        self._is_one_host = len(set(self._hosts)) == 1
        self._watch = Watch(self._peers(), self._lost)

    def broadcast(self, message: bytes) -> bytes:
        """A waiting rank does not keep a processor busy for long, as MPI's own broadcast would."""
        if self.mapping.rank == 0:
            for rank in range(1, self.mapping.world_size):
                self._comm.Send(bytearray(message), dest=rank, tag=MESSAGE_TAG)
            return message
        return self._heard(0)

    def share(self, value: Any) -> Any:
        return msgpack.unpackb(self.broadcast(msgpack.packb(value)), strict_map_key=False)

    def gather(self, value: Any) -> list[Any]:
        packed = msgpack.packb(value)
        if self.mapping.rank:
            self._comm.Send(bytearray(packed), dest=0, tag=MESSAGE_TAG)
            return list(self.share(None))
        others = (self._heard(rank) for rank in range(1, self.mapping.world_size))
        own = [msgpack.unpackb(each, strict_map_key=False) for each in (packed, *others)]
        return list(self.share(own))

    def all_say(self, text: str) -> bool:
        others = [rank for rank in range(self.mapping.world_size) if rank != self.mapping.rank]
        requests = [
            self._comm.Isend(bytearray(text.encode()), dest=rank, tag=FAILURE_TAG)
            for rank in others
        ]
        deadline = monotonic() + AGREE_SECONDS
        heard = [self._receive(rank, FAILURE_TAG, deadline) for rank in others]
        agrees = all(message == text.encode() for message in heard)
        if agrees:
            for request in requests:
                request.Wait()
        return agrees

    def all_reduce(self, values: torch.Tensor) -> None:
        self._tensors.all_reduce(values)

    def all_reduce_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        self._tensors.all_reduce_into(total, values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._tensors.all_gather(values).transpose(0, 1).reshape(len(values), -1)

    def best_offers(self, offers: torch.Tensor) -> torch.Tensor:
        if self._peer_sums is None:
            return super().best_offers(offers)
        return self._peer_sums.best_offers(offers)

    def join(self, device: torch.device) -> None:
        """Connects the ranks' devices, through a store of rank 0 on a free port of its host."""
        stores, store = _stores(), None
        if self.mapping.rank == 0:
            store = stores(self._first_host, 0, is_master=True, wait_for_workers=False)
        port = self.share(store.port if store is not None else None)
        if store is None:
            store = stores(self._first_host, port, is_master=False, timeout=START_TIMEOUT)
        rank, size, backend = self.mapping.rank, self.mapping.world_size, "gloo"
        place = self._hosts[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            place = str(torch.cuda.get_device_properties(device).uuid)
        places = self.gather(place)
        self.ranks_on_device = places.count(place)
        if device.type == "cuda":
            if len(set(places)) == size:
                backend = "nccl"
            else:
                self._tensors = ThroughHost()
                logger.warning("ranks share a CUDA device: sums go over the host, without graphs")
        self.captures = self._tensors.captures
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        if backend == "nccl" and size > 1 and self._is_one_host and has_kernels(device):
            self._choose_sums(device)

    def _choose_sums(self, device: torch.device) -> None:
        """Chooses the fastest sum by size, where all devices can write each other's memory. Errors
        other than NoPeerMemory may be those of one rank, which must not go on without the
        others."""
        try:
            self._peer_sums = PeerSums(device, self)
        except NoPeerMemory as error:
            logger.info("sums are NCCL's: %s", error)
            return
        self._tensors = choose_sums(self._peer_sums.ways, graph_seconds(device), self.share)

    def before_close(self, release: Callable[[], None]) -> None:
        self._releases.append(release)

    def close(self) -> None:
        """Ends what ranks do together first, while another rank's death would still be noticed."""
        while self._releases:
            self._releases.pop(0)()
        if self._peer_sums is not None:
            self._peer_sums.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._started is not None:
            self._comm.Free()  # Open MPI waits for ever when it is to disconnect a merged one
            self._started.Disconnect()
        self._watch.close()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def abort(self, reason: str) -> None:
        self._watch.fail(reason)
        self._end(f"rank {self.mapping.rank} has failed: {reason}")

    def _lost(self, reason: str) -> None:
        self._tell(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """The executor's thread may hang in a collective, and MPI's own end would wait for the
        other ranks, so nothing is cleaned up. Not by a daemon thread: if the main thread ends
        meanwhile, these stop, and it would get to MPI's own end."""
        logger.error("all ranks end: %s", reason)
        last = threading.Thread(target=_exit_soon, daemon=False)
        try:
            last.start()
        except RuntimeError:  # Python ends already, and its main thread waits for a lost rank
            _exit_soon()
        last.join()

    @property
    def _first_host(self) -> str:
        return "127.0.0.1" if self._is_one_host else self._hosts[0]

    def _peers(self) -> list[tuple[str, socket.socket]]:
        """Rank 0's connections to all others, or another rank's to rank 0."""
        names = self.gather(f"process {os.getpid()} on {self._hosts[self.mapping.rank]}")
        if self.mapping.rank:
            host, port, token = self.share(None)
            connection = socket.create_connection((host, port))
            connection.sendall(token + self.mapping.rank.to_bytes(4, "little"))
            return [(f"rank 0 ({names[0]})", connection)]
        listener = socket.create_server(("127.0.0.1" if self._is_one_host else "", 0))
        token = secrets.token_bytes(16)
        self.share([self._first_host, listener.getsockname()[1], token])
        found = accept(listener, token, self.mapping.world_size - 1)
        return [(f"rank {rank} ({names[rank]})", connection) for rank, connection in found]

    def _heard(self, rank: int) -> bytes:
        received = self._receive(rank, MESSAGE_TAG, None)
        assert received is not None
        return received

    def _receive(self, source: int, tag: int, deadline: float | None) -> bytes | None:
        """None if there is no message before the deadline."""
        from mpi4py import MPI

        status, num_polls = MPI.Status(), 0
        while not self._comm.Iprobe(source=source, tag=tag, status=status):
            num_polls += 1
            if num_polls > SPINS:
                if deadline is not None and monotonic() > deadline:
                    return None
                sleep(SLEEP_SECONDS)
        buffer = bytearray(status.Get_count())
        self._comm.Recv(buffer, source=source, tag=tag)
        return bytes(buffer)


def _exit_soon() -> None:
    sleep(LAST_SECONDS)
    os._exit(FAILED)


def _stores() -> Any:
    """torch's store over TCP, which its type annotations do not export."""
    return getattr(dist, "TCPStore")  # noqa: B009 # the attribute is not exported
