"""Starts the other ranks of a model with tensor parallelism, or joins those that mpirun started.

`python -m tllm_spec.ranks` is such a rank: it runs the rounds that rank 0 decides on, and sends no
responses."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tllm_spec.child_command import module_command
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.distributed.mpirun import find_mpiexec, undo_default_binding
from tllm_spec.distributed.rank_checks import checkpoints, mismatch, versions
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.executor.ranks import FollowerQueue, RanksEnded
from tllm_spec.executor.request import LlmRequest, Response, StopOptions
from tllm_spec.executor.request_wire import RequestLimits, unpack_requests
from tllm_spec.executor.worker import recover
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammars import Grammars
from tllm_spec.models.registry import check_shards
from tllm_spec.rank_calls import calls_of
from tllm_spec.request_errors import described
from tllm_spec.text.stop_strings import look_for_stops
from tllm_spec.text.tokenizer import Tokenizer, tokenizer_of
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

MISSING = (
    "tensor_parallel_size = {size} needs the package mpi4py: pip install 'tllm_spec[parallel]'"
)
NO_LIBRARY = (
    "tensor_parallel_size = {size} needs an MPI library, and mpi4py finds none: "
    "install one, for example with pip install mpich"
)
NOT_STARTED = (
    "tensor_parallel_size = {size}: MPI could not start the other ranks ({error}); it may have "
    "printed why. As root, Open MPI 5 starts none without PRTE_ALLOW_RUN_AS_ROOT=1 and "
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1"
)
# What Spawn finds as mpiexec. It has no input: with a closed one MPICH's processes would take the
# FIFO for it, and poll it for as long as this process lives.
MPIEXEC = """import fcntl, os, sys
os.setsid()
fifo = os.open({fifo!r}, os.O_WRONLY)
os.set_inheritable(fcntl.fcntl(fifo, fcntl.F_DUPFD, 10), True)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execv({mpiexec!r}, [{mpiexec!r}, *sys.argv[1:]])
"""
# What Spawn starts: a rank that first of all opens the FIFO, if it is on this host. It gets a
# descriptor that is free: MPI has opened others, and has told the rank their numbers. On one line,
# since MPICH takes an argument's second line for something else.
RANK = (
    'for n in 9 8 7 6 5 4 3; do [ -e /dev/fd/$n ] || { [ -p "$0" ] && eval "exec $n> \\"\\$0\\""; '
    'break; }; done; exec "$@"'
)
ONCE = (
    "tensor_parallel_size = {size}: this process is a rank of another model already, or uses "
    "torch.distributed; shut that down first, or start another process"
)
FAILED = 1  # exit status
VERSION, CHECKPOINT = "the version of", "the checkpoint"
NEXT_TAG = 3  # of what rank 0 tells mpirun's other processes between models
POLL_SECONDS = 0.005


class SharedError(Exception):
    """An error on another rank than the first: rank 0 has the same one, and reports it."""


def join_ranks(args: LlmArgs) -> Communicator:
    """This process's communicator. On rank 0 it returns when all ranks are there; the other
    processes of mpirun serve every model of rank 0 until it ends (`release_ranks`), and end with
    SystemExit.

    Raises:
        ValueError: MPI is missing, mpirun started another number of processes, the ranks have
            different versions or checkpoints, a size of the model cannot be split over them, MPI
            cannot start them, or this process is a rank already.
    """
    if args.tensor_parallel_size == 1:
        return SINGLE
    undo_default_binding()
    if torch.distributed.is_initialized():
        raise ValueError(ONCE.format(size=args.tensor_parallel_size))
    are_joined = threading.Event()
    comm, started = _comm(args, are_joined)
    if comm.rank:
        follow(comm)
    from tllm_spec.distributed.process_group import ProcessGroup

    if started is None:
        _tell_ranks(comm, has_model=True)
        atexit.unregister(release_ranks)
        atexit.register(release_ranks)
    group = ProcessGroup(comm, started, args.ep_size)
    are_joined.set()
    _check_equal(VERSION, versions(), group)
    group.share(args.as_options())
    _check_equal(CHECKPOINT, checkpoints(args), group)
    return group


def build_together(
    args: LlmArgs,
    tokenizer: Tokenizer | None,
    respond: Callable[[list[Response]], None],
    communicator: Communicator,
) -> BuiltExecutor:
    """`build_executor` on each rank. What all ranks raise is raised, on the others as SharedError;
    what only some of them raise ends all their processes."""
    try:
        return build_executor(args, tokenizer, respond, communicator)
    except BaseException as error:  # a process border: the other ranks must not wait for this one
        if not communicator.all_say(described(error)):
            communicator.abort(described(error))
        communicator.close()
        if communicator.mapping.rank:
            raise SharedError from error
        raise


def release_ranks() -> None:
    """On rank 0, whose models have been shut down: mpirun's other processes wait for no further
    model, and end. Called at the end of this process if not before."""
    from mpi4py import MPI

    atexit.unregister(release_ranks)
    if not MPI.Is_finalized():
        _tell_ranks(MPI.COMM_WORLD, has_model=False)


def _tell_ranks(world: MPI.Intracomm, *, has_model: bool) -> None:
    for rank in range(1, world.size):
        world.Send(bytearray([has_model]), dest=rank, tag=NEXT_TAG)


def _is_told_of_model(world: MPI.Intracomm) -> bool:
    """Waits for what rank 0 does next: for a long time, perhaps, so without keeping a processor
    busy as MPI would."""
    while not world.Iprobe(source=0, tag=NEXT_TAG):
        sleep(POLL_SECONDS)
    told = bytearray(1)
    world.Recv(told, source=0, tag=NEXT_TAG)
    return bool(told[0])


def follow(world: MPI.Intracomm) -> NoReturn:
    """Serves one model after the other as another rank of mpirun than the first. Ends with
    SystemExit, whose status is that of the last model."""
    status = 0
    while _is_told_of_model(world):
        status = _follow_model(world)
    sys.exit(status)


def _follow_model(comm: MPI.Intracomm, parent: MPI.Intercomm | None = None) -> int:
    """Returns an exit status."""
    from tllm_spec.distributed.process_group import ProcessGroup

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides about the end
    _mark_logs(comm.rank)
    group = ProcessGroup(comm, parent)
    try:
        _check_equal(VERSION, versions(), group)
        args = LlmArgs(**group.share(None))
        _check_equal(CHECKPOINT, checkpoints(args), group)
        tokenizer = tokenizer_of(args)
        built = build_together(args, tokenizer, lambda responses: None, group)
        run_until_end(built, args, tokenizer)
    except SharedError:  # rank 0 reports it
        return FAILED
    except BaseException as error:  # a process border: the other ranks must not wait for this one
        logger.exception("rank %d has failed", comm.rank)
        group.abort(described(error))
    group.close()
    return 0


def _comm(args: LlmArgs, are_joined: threading.Event) -> tuple[MPI.Intracomm, MPI.Intercomm | None]:
    """The ranks, and what joins this one to those that it has started. `are_joined`: set once the
    ranks notice by themselves that one has ended."""
    # A rank takes a device and not a processor. Read by Open MPI when it is loaded.
    os.environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    size = args.tensor_parallel_size
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(MISSING.format(size=size)) from error
    except RuntimeError as error:  # its message is what dlopen has tried
        raise ValueError(NO_LIBRARY.format(size=size)) from error
    world = MPI.COMM_WORLD
    if world.size == size:
        return world, None
    if world.size > 1:
        raise ValueError(
            f"tensor_parallel_size = {size}, and mpirun has started {world.size} processes; the "
            "numbers must be equal"
        )
    # Before the other ranks load their libraries, which takes long.
    check_shards(resolve_model(args.model), size, args.ep_size)
    unbound = MPI.Info.Create({"bind_to": "none"})  # or Open MPI 4 binds each to one core
    try:
        with _mpiexec_on_path(are_joined) as fifo:
            command = ["-c", RANK, fifo, *module_command("tllm_spec.ranks")]
            started = MPI.COMM_SELF.Spawn("/bin/sh", command, size - 1, unbound)
    except MPI.Exception as error:
        raise ValueError(NOT_STARTED.format(size=size, error=error)) from error
    return started.Merge(high=False), started


@contextmanager
def _mpiexec_on_path(are_joined: threading.Event) -> Iterator[str]:
    """Spawn runs `mpiexec` from PATH. When a rank dies, MPICH's mpiexec kills its own process
    group, so it gets one. Mpiexec and the ranks have a FIFO open, whose path is yielded: it closes
    with them. Open MPI does not run our script."""
    path, found = os.environ.get("PATH", ""), find_mpiexec()
    if found is None:
        yield ""  # Spawn reports it
        return
    with TemporaryDirectory() as folder:
        script, fifo = Path(folder) / "mpiexec", Path(folder) / "started"
        os.mkfifo(fifo)
        watch = threading.Thread(target=_end_with_ranks, args=(fifo, are_joined), daemon=True)
        watch.start()
        script.write_text(mpiexec_script(str(fifo), found))
        script.chmod(0o700)
        # Open MPI 5 runs `prte`, which its wheel has next to mpiexec.
        os.environ["PATH"] = os.pathsep.join([folder, path, str(Path(found).parent)])
        try:
            yield str(fifo)
        finally:
            os.environ["PATH"] = path


def mpiexec_script(fifo: str, mpiexec: str) -> str:
    """Starts `mpiexec` with the FIFO open. By way of a shell: the first line of a script cannot
    name an interpreter whose path is long or has a space."""
    program = MPIEXEC.format(fifo=fifo, mpiexec=mpiexec)
    return f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", "-c", program])} "$@"\n'


def _end_with_ranks(fifo: Path, are_joined: threading.Event) -> None:
    """MPI would wait for ever for a rank that has ended before it joined."""
    try:
        with fifo.open("rb") as closed_at_the_end:
            closed_at_the_end.read()
    except FileNotFoundError:
        return  # Spawn has raised already, and nothing was started
    if are_joined.is_set():
        return
    logger.error("all ranks end: one of those that rank 0 has started ended before it joined")
    shutil.rmtree(fifo.parent, ignore_errors=True)
    os._exit(FAILED)


def _check_equal(what: str, facts: Mapping[str, str], communicator: Communicator) -> None:
    """Raises ValueError if the ranks' facts differ, on other ranks than the first SharedError. Both
    have the same message."""
    problem = mismatch(communicator.gather(dict(facts)), what)
    if problem is None:
        return
    communicator.close()
    if communicator.mapping.rank:
        logger.error("%s", problem)
        raise SharedError(problem)
    raise ValueError(problem)


def run_until_end(built: BuiltExecutor, args: LlmArgs, tokenizer: Tokenizer | None) -> None:
    """Rounds until rank 0 ends."""
    queue, executor = built.queue, built.executor
    assert isinstance(queue, FollowerQueue)
    grammars = Grammars.of(args, tokenizer, built.limits)
    grammars.prepare()
    queue.make = partial(_requests, built.limits, tokenizer, grammars)
    queue.calls = calls_of(executor)
    executor.enter_thread()
    while True:
        try:
            executor.step()
        except RanksEnded:
            executor.check_integrity()
            return
        except BaseException as error:  # process border: other requests go on
            if not queue.all_failed(described(error)):
                raise
            recover(executor, error)


def _requests(
    limits: RequestLimits, tokenizer: Tokenizer | None, grammars: Grammars, message: Sequence[Any]
) -> list[LlmRequest]:
    """Makes a prompt's requests as rank 0 has them."""
    packed, stop, grammar = message
    ids, source = packed[0], None if grammar is None else GrammarSource(*grammar)
    states = grammars.states_of(source, len(ids))
    requests = unpack_requests(packed, ids, limits, states)
    if stop is not None:
        assert tokenizer is not None
        options = StopOptions(**stop | {"stops": tuple(stop["stops"])})
        look_for_stops(requests, tokenizer, options, grammars.sections.of(source))
    return requests


def _mark_logs(rank: int) -> None:
    """Rank 0 logs for all; of the others only errors are shown."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(levelname)s rank {rank} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)


def main() -> None:
    """A rank that `join_ranks` has started."""
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    sys.exit(_follow_model(parent.Merge(high=True), parent))


if __name__ == "__main__":
    main()
