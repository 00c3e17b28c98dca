"""The communicator of several processes: links for plain data, torch.distributed for tensors (NCCL
on CUDA, gloo on a CPU). Links are MPI's between mpirun's processes, and socket pairs between rank 0
and the ranks that it has started.

When one process ends, all do: what a rank waits for in a round would never come."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgpack
import torch
import torch.distributed as dist

from tllm_spec.distributed.communicator import Collectives, Communicator, Mapping, ThroughHost
from tllm_spec.distributed.peer_sums import NoPeerMemory, PeerSums, choose_sums, graph_seconds
from tllm_spec.distributed.watch import Watch, accept, connect, listen
from tllm_spec.kernels.dispatch import has_kernels

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

START_TIMEOUT = timedelta(seconds=120)
MESSAGE_TAG, FAILURE_TAG = 1, 2
# About 5 ms of polling, of MPI and of a pipe; then the waiting rank sleeps.
SPINS, POLLS = 10_000, 500
SLEEP_SECONDS = 0.0002
AGREE_SECONDS = 3.0  # that ranks wait for the others after an error
LAST_SECONDS = 1.0  # between telling clients of a lost rank and the end of the process
FAILED = 1  # exit status


class MpiLinks:
    """The links of mpirun's processes."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm

    def send(self, message: bytes, rank: int, tag: int) -> None:
        """Returns before a short message is received."""
        self._comm.Send(bytearray(message), dest=rank, tag=tag)

    def receive(self, rank: int, tag: int, deadline: float | None = None) -> bytes | None:
        """The next message of that tag. None if there is none before the deadline. A waiting rank
        does not keep a processor busy for long, as MPI itself would."""
        from mpi4py import MPI

        status, num_polls = MPI.Status(), 0
        while not self._comm.Iprobe(source=rank, tag=tag, status=status):
            num_polls += 1
            if num_polls > SPINS:
                if deadline is not None and monotonic() > deadline:
                    return None
                sleep(SLEEP_SECONDS)
        buffer = bytearray(status.Get_count())
        self._comm.Recv(buffer, source=rank, tag=tag)
        return bytes(buffer)

    def meet(self, group: Communicator) -> tuple[list[str], list[tuple[str, socket.socket]]]:
        """The ranks' hosts, and for the watch rank 0's connections to all others, or another rank's
        to rank 0, with what to call them."""
        found = group.gather([socket.gethostname(), os.getpid()])
        hosts = [host for host, _ in found]
        names = [f"rank {n} (process {pid} on {host})" for n, (host, pid) in enumerate(found)]
        is_one_host = len(set(hosts)) == 1
        if self.rank:
            port, token = group.share(None)
            address = "127.0.0.1" if is_one_host else hosts[0], port
            return hosts, [(names[0], connect(address, token, self.rank))]
        listener = listen("127.0.0.1" if is_one_host else "")
        token = secrets.token_bytes(16)
        group.share([listener.getsockname()[1], token])
        return hosts, [(names[n], other) for n, other in accept(listener, token, self.size - 1)]

    def close(self) -> None:
        """mpirun waits for its processes."""


class PairLinks:
    """The links of rank 0 and the ranks that it has started: for each a pipe of messages and a
    socket pair for the watch. The kernel closes both with a process, so the end of a rank is
    noticed at any time."""

    def __init__(
        self,
        rank: int,
        size: int,
        messages: dict[int, Connection],
        watched: list[tuple[str, socket.socket]],
        processes: Sequence[Popen[bytes]] = (),
    ) -> None:
        self.rank, self.size, self._messages, self._watched = rank, size, messages, watched
        self._processes = processes
        self._arrived: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    @classmethod
    def start(cls, size: int, command: Sequence[str]) -> PairLinks:
        """Rank 0's. Starts the others with their arguments after the command: the rank, the size,
        and two descriptors. A Ctrl-C does not reach them: rank 0 decides about the end."""
        messages, watched, processes = {}, [], []
        for rank in range(1, size):
            messages[rank], other_end = Pipe()
            own, other = socket.socketpair()
            with other_end, other:
                numbers = other_end.fileno(), other.fileno()
                process = Popen(
                    [*command, *map(str, (rank, size, *numbers))],
                    stdin=DEVNULL,
                    pass_fds=numbers,
                    start_new_session=True,
                )
            watched.append((f"rank {rank} (process {process.pid})", own))
            processes.append(process)
        return cls(0, size, messages, watched, processes)

    @classmethod
    def started(cls, arguments: Sequence[str]) -> PairLinks:
        """Another rank's, from its arguments."""
        rank, size, *numbers = map(int, arguments)
        for number in numbers:
            os.set_inheritable(number, False)  # or a child would keep them open
        watched = (f"rank 0 (process {os.getppid()})", socket.socket(fileno=numbers[1]))
        return cls(rank, size, {0: Connection(numbers[0])}, [watched])

    def send(self, message: bytes, rank: int, tag: int) -> None:
        """As that of MpiLinks."""
        with suppress(OSError):  # the other rank has ended, and the watch ends this one
            self._messages[rank].send_bytes(bytes([tag]) + message)

    def receive(self, rank: int, tag: int, deadline: float | None = None) -> bytes | None:
        """As that of MpiLinks."""
        connection, arrived = self._messages[rank], self._arrived[rank, tag]
        while not arrived:
            left = None if deadline is None else max(deadline - monotonic(), 0)
            if not (any(connection.poll() for _ in range(POLLS)) or connection.poll(left)):
                return None
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                threading.Event().wait()  # for the watch, which ends this process
            self._arrived[rank, message[0]].append(message[1:])
        return arrived.popleft()

    def meet(self, group: Communicator) -> tuple[list[str], list[tuple[str, socket.socket]]]:
        """As that of MpiLinks."""
        return [socket.gethostname()] * self.size, self._watched

    def close(self) -> None:
        """Waits for the processes that this one has started."""
        for connection in self._messages.values():
            connection.close()
        for process in self._processes:
            process.wait()


Links = MpiLinks | PairLinks


class ProcessGroup(Communicator):
    """One rank of those that serve one model with tensor parallelism. Tensors can be sent after
    `join`. `ep_size`: as `Mapping`; rank 0's counts."""

    def __init__(self, links: Links, ep_size: int = 1) -> None:
        self._links, self._tensors = links, Collectives()
        self._peer_sums: PeerSums | None = None
        self._tell: Callable[[str], None] = lambda reason: None
        self._releases: list[Callable[[], None]] = []
        self.mapping = Mapping(links.rank, links.size, links.size)
        self._hosts, peers = links.meet(self)
        self._watch = Watch(peers, self._lost)
        self._is_one_host = len(set(self._hosts)) == 1
        self.mapping = replace(self.mapping, ep_size=self.share(ep_size))

    def broadcast(self, message: bytes) -> bytes:
        if self.mapping.rank:
            return self._heard(0)
        for rank in range(1, self.mapping.world_size):
            self._links.send(message, rank, MESSAGE_TAG)
        return message

    def share(self, value: Any) -> Any:
        return msgpack.unpackb(self.broadcast(msgpack.packb(value)), strict_map_key=False)

    def gather(self, value: Any) -> list[Any]:
        packed = msgpack.packb(value)
        if self.mapping.rank:
            self._links.send(packed, 0, MESSAGE_TAG)
            return list(self.share(None))
        others = (self._heard(rank) for rank in range(1, self.mapping.world_size))
        own = [msgpack.unpackb(each, strict_map_key=False) for each in (packed, *others)]
        return list(self.share(own))

    def all_say(self, text: str) -> bool:
        said, deadline = sha256(text.encode()).digest(), monotonic() + AGREE_SECONDS
        if self.mapping.rank:
            self._links.send(said, 0, FAILURE_TAG)
            return self._links.receive(0, FAILURE_TAG, deadline) == said
        others = range(1, self.mapping.world_size)
        heard = [self._links.receive(rank, FAILURE_TAG, deadline) for rank in others]
        agrees = all(each == said for each in heard)
        for rank in others:
            self._links.send(said if agrees else b"", rank, FAILURE_TAG)
        return agrees

    def minimum(self, number: int) -> int:
        return int(min(self.gather(number)))

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
        self._watch.close()
        self._links.close()

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

    def _heard(self, rank: int) -> bytes:
        message = self._links.receive(rank, MESSAGE_TAG)
        assert message is not None
        return message


def _exit_soon() -> None:
    sleep(LAST_SECONDS)
    os._exit(FAILED)


def _stores() -> Any:
    """torch's store over TCP, which its type annotations do not export."""
    return getattr(dist, "TCPStore")  # noqa: B009 # the attribute is not exported
