"""Starts the other ranks of a model with tensor parallelism, or joins those that mpirun started.

`python -m tllm_spec.ranks` is such a rank: it runs the rounds that rank 0 decides on, and sends no
responses."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tllm_spec import __version__
from tllm_spec.config import LlmArgs
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.ranks import FollowerQueue, RanksEnded
from tllm_spec.request_factory import RequestFactory
from tllm_spec.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from mpi4py import MPI

MISSING = (
    "tensor_parallel_size = {size} needs the package mpi4py: pip install 'tllm_spec[parallel]'"
)


def join_ranks(args: LlmArgs) -> Communicator:
    """This process's communicator. On rank 0 it returns when all ranks are there; the other
    processes of mpirun serve until rank 0 ends, and end with SystemExit.

    Raises:
        ValueError: mpi4py is missing, or mpirun started another number of processes.
    """
    if args.tensor_parallel_size == 1:
        return SINGLE
    comm = _comm(args.tensor_parallel_size)
    if comm.rank:
        follow(comm)
    from tllm_spec.distributed.process_group import ProcessGroup

    group = ProcessGroup(comm)
    group.broadcast(_as_plain(args))
    return group


def follow(comm: MPI.Intracomm) -> NoReturn:
    """Serves as another rank than the first. Ends with SystemExit."""
    import msgpack

    from tllm_spec.distributed.process_group import ProcessGroup

    group = ProcessGroup(comm)
    message = msgpack.unpackb(group.broadcast(b""))
    if message["version"] != __version__:
        print(f"rank {comm.rank} has tllm_spec {__version__}; rank 0 {message['version']}")
        group.abort()
    _run(LlmArgs(**message["args"]), group)
    sys.exit(0)


def _comm(size: int) -> MPI.Intracomm:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(MISSING.format(size=size)) from error
    world = MPI.COMM_WORLD
    if world.size == size:
        return world
    if world.size > 1:
        raise ValueError(
            f"tensor_parallel_size = {size}, and mpirun has started {world.size} processes; the "
            "numbers must be equal"
        )
    _put_mpiexec_on_path()
    started = MPI.COMM_SELF.Spawn(sys.executable, args=["-m", "tllm_spec.ranks"], maxprocs=size - 1)
    return started.Merge(high=False)


def _put_mpiexec_on_path() -> None:
    """MPICH's wheel has mpiexec next to the interpreter, which need not be on PATH."""
    if shutil.which("mpiexec") is None:
        folder = str(Path(sys.executable).parent)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


def _as_plain(args: LlmArgs) -> bytes:
    """Raises ValueError for arguments that are objects of this process."""
    import msgpack

    options: dict[str, Any] = args.model_dump(mode="json", exclude_unset=True)
    return bytes(msgpack.packb({"version": __version__, "args": options}))


def _run(args: LlmArgs, communicator: Communicator) -> None:
    """Rounds until rank 0 ends."""
    tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args.tokenizer or args.model)
    built = build_executor(args, tokenizer, lambda responses: None, communicator)
    factory = RequestFactory(
        tokenizer, built.model_config, built.max_seq_len, built.max_draft_len, built.new_pause
    )
    assert isinstance(built.queue, FollowerQueue)
    built.queue.make = factory.make_from_plain
    built.executor.enter_thread()
    try:
        while True:
            built.executor.step()
    except RanksEnded:
        communicator.close()


def main() -> None:
    """A rank that `join_ranks` has started."""
    from mpi4py import MPI

    follow(MPI.Comm.Get_parent().Merge(high=True))


if __name__ == "__main__":
    main()
