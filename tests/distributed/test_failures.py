"""What ends all ranks, and what does not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from tests.distributed.worlds import REPOSITORY, World, mpirun, run, run_world, start
from tests.models.helpers import save_checkpoint
from tests.server.http_answers import SECONDS, wait_for
from tllm_spec.cli import serve
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import Collectives, Communicator
from tllm_spec.distributed.mpirun import find_mpiexec
from tllm_spec.distributed.peer_sums import NoPeerMemory
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.graphs.slot_graphs import GraphPool
from tllm_spec.server.supervisor import ServeError
from tllm_spec.zoo.registry import resolve_model

pytest.importorskip("mpi4py")

PROGRAM = ["-m", "tests.distributed.failing_world"]
KILLED_AT_ITS_START = """
import os, signal, sys
if "tllm_spec.ranks" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_AT_ITS_END = """
import os, signal, sys
if "tllm_spec.ranks" in sys.orig_argv:
    from tllm_spec.distributed.process_group import ProcessGroup
    ProcessGroup.close = lambda group: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, "Llama")
    return str(path)


ONE_AFTER_THE_OTHER = """
import sys
from tllm_spec.llm import LLM

for model in ("zoo:llama", sys.argv[1], "zoo:llama"):
    try:
        with LLM(model, skip_tokenizer_init=True, device="cpu", tensor_parallel_size=2) as llm:
            found = llm.generate([5, 6, 7], {"max_tokens": 4}, use_tqdm=False)
            print("answer", found.outputs[0].token_ids, flush=True)
    except ValueError as error:
        print("refused", error, flush=True)
"""


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[Popen[str], list[int]]]:
    """A program with a running request, and the process ids of its ranks."""
    process = start(command)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not (lines and lines[-1].startswith("processes")):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        yield process, [int(word) for word in lines[-1].split()[1:]]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def end_after_kill(command: list[str], rank: int) -> tuple[int, str]:
    """Exit status and output of a program, one of whose ranks is killed. The status is ours or, if
    Open MPI is faster, that of its error."""
    with serving(command) as (process, ranks):
        os.kill(ranks[rank], signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
        wait_for(lambda: not any(map(is_running, ranks)))
    return process.returncode, output


def run_changed(change: str, change_folder: Path, *arguments: str) -> World:
    """The program, in whose processes `change` runs first."""
    (change_folder / "sitecustomize.py").write_text(change)
    path = os.pathsep.join([str(change_folder), str(REPOSITORY)])
    return run([sys.executable, *PROGRAM, *arguments], PYTHONPATH=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "kind", "ends", "sentences"),
    [
        (2, "all", False, ["error MemoryError: no room for counts", "others [8, 8, 8, 8]"]),
        (2, "one", True, ["error rank 1 (process", "has ended: MemoryError: no room for counts"]),
        (3, "none", True, ["tensor_parallel_size = 2, and mpirun has started 3 processes"]),
    ],
    ids=["all ranks", "one rank", "another number"],
)
def test_a_round_that_fails_on_all_ranks_fails_its_request_and_another_fault_ends_all(
    num_ranks: int, kind: str, ends: bool, sentences: list[str], folder: str
) -> None:
    world = run_world(num_ranks, [*PROGRAM, folder, kind])
    assert bool(world.returncode) == ends, world.output
    assert all(sentence in world.output for sentence in sentences), world.output


@pytest.mark.slow
def test_ranks_of_mpirun_serve_one_model_after_the_other(tmp_path: Path) -> None:
    """The second is one that no rank can load."""
    save_checkpoint(tmp_path, "Llama")
    (tmp_path / "model.safetensors").write_bytes(b"")
    world = run_world(2, ["-c", ONE_AFTER_THE_OTHER, str(tmp_path)])
    assert world.returncode == 0, world.output
    answers = [line for line in world.output.splitlines() if line.startswith("answer")]
    assert len(answers) == 2 and answers[0] == answers[1], world.output
    assert "refused" in world.output


@pytest.mark.slow  # tests/distributed/test_watch.py: what counts as a lost rank
def test_a_killed_rank_ends_the_model_that_started_it(folder: str) -> None:
    status, output = end_after_kill([sys.executable, *PROGRAM, folder, "none"], 1)
    assert status > 0, output
    assert "error rank 1 (process" in output and "all ranks end: rank 1" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kind", "sentences"),
    [
        (KILLED_AT_ITS_START, "none", ["ended before it joined"]),
        (KILLED_AT_ITS_END, "ends", ["all ranks end: rank 1", "others [8, 8, 8, 8]"]),
    ],
    ids=["before it joins", "while they part"],
)
def test_a_rank_that_is_killed_early_or_late_ends_the_model_that_started_it(
    change: str, kind: str, sentences: list[str], folder: str, tmp_path: Path
) -> None:
    world = run_changed(change, tmp_path, folder, kind)
    assert world.returncode == 1, world.output
    assert all(sentence in world.output for sentence in sentences), world.output


@pytest.mark.slow
def test_two_models_run_next_to_each_other_and_only_one_ends_with_its_rank(folder: str) -> None:
    """Their ports do not clash."""
    command = [sys.executable, *PROGRAM, folder, "none"]
    with serving(command) as (_, others):
        status, output = end_after_kill(command, 1)
        assert status > 0, output
        assert all(map(is_running, others)) and len(set(others)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("by_mpirun", "rank"), [(True, 1), (False, 0), (True, 0)])
def test_the_other_ranks_end_after_one_is_killed(folder: str, by_mpirun: bool, rank: int) -> None:
    """mpirun ends the others, too, perhaps before they have written why."""
    program = [*PROGRAM, folder, "none"]
    command = mpirun(2, program) if by_mpirun else [sys.executable, *program]
    status, output = end_after_kill(command, rank)
    assert status != 0
    assert rank == 0 or re.search(r"rank 1 \(process|signal 9", output), output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["version", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_an_unlike_rank_is_refused_at_start_with_one_message_on_all(
    kind: str, folder: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "Llama", rms_norm_eps=1e-4)
    other = "version" if kind == "version" else str(tmp_path)
    world = run_world(2, ["-m", "tests.distributed.unlike_world", folder, other])
    assert world.returncode != 0
    reason = r"the version of tllm_spec is 0\.0\.1 on rank 1 and \S+ on rank 0; all ranks need"
    if kind == "checkpoint":
        reason = rf"the checkpoint {folder} is \S+ on rank 1 and \S+ on rank 0; all ranks need"
    assert re.search(f"rank 0 refused: {reason}", world.output), world.output
    assert re.search(f"ERROR rank 1 tllm_spec.ranks: {reason}", world.output), world.output
    assert "Traceback" not in world.output


# A server that mpirun starts in several processes ends all of them after a mistake that only the
# first one finds, before it joins the others.


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """This process is the first of two that mpirun has started. What is yielded grows when it ends
    the other."""
    found: list[bool] = []
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(serve, "end_mpirun", lambda: found.append(True))
    monkeypatch.setattr(serve, "configure_logs", lambda *arguments: None)
    return found


def test_a_model_that_does_not_exist_ends_the_others(ends: list[bool]) -> None:
    result = CliRunner().invoke(serve.main, ["/none", "--tp_size", "2"])
    assert (result.exit_code, ends) == (1, [True])
    assert result.output.count("Error: model '/none' is neither") == 1


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_server_that_has_not_joined_when_it_fails_ends_the_others(
    has_joined: bool, ends: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has joined tells them itself."""

    def fail(*arguments: object) -> int:
        raise ServeError("no tokenizer", has_joined)

    monkeypatch.setattr(serve, "serve", fail)
    result = CliRunner().invoke(serve.main, ["zoo:llama", "--port", "0", "--tp_size", "2"])
    assert (result.exit_code, ends) == (1, [] if has_joined else [True])
    assert result.output.count("Error: no tokenizer") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_two_servers_of_one_rank_are_refused_by_the_first(
    rank: int, ends: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", str(rank))
    result = CliRunner().invoke(serve.main, ["zoo:llama"])
    assert (result.exit_code, ends) == (1, [])
    assert ("give --tp_size 2, or start one process" in result.output) == (rank == 0)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["model", "port", "tokenizer"])
def test_mpirun_ends_after_a_mistake(mistake: str, tmp_path: Path) -> None:
    model, port, sentence = "zoo:llama", 0, "is neither an existing local folder"
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        if mistake == "model":
            model = "/none"
        elif mistake == "port":
            port, sentence = listener.getsockname()[1], "cannot listen on"
        else:
            shutil.copytree(resolve_model(model), tmp_path / "model")
            model, sentence = str(tmp_path / "model"), "no tokenizer can be loaded"
            (tmp_path / "model" / "tokenizer.json").unlink()
        mpiexec = find_mpiexec()
        assert mpiexec is not None
        command = [sys.executable, "-m", "tllm_spec.cli.serve", model, "--port", str(port)]
        world = run([mpiexec, "-n", "2", *command, "--tp_size", "2"])
    assert world.returncode != 0
    assert world.output.count(sentence) == 1, world.output


# How ranks shut down: CUDA graphs are released first, since NCCL waits for those that hold its
# collectives, and until the end a rank that is lost is noticed.


MPI = pytest.importorskip("mpi4py.MPI")
CPU = torch.device("cpu")


class Remembering(Communicator):
    def __init__(self) -> None:
        self.releases: list[Callable[[], None]] = []

    def before_close(self, release: Callable[[], None]) -> None:
        self.releases.append(release)


def test_the_graphs_of_an_executor_are_released_before_the_ranks_part() -> None:
    """Its pool of graphs is empty on a CPU, so one stands in for them."""
    communicator, graph = Remembering(), mock.Mock()
    args = LlmArgs.from_kwargs("zoo:llama", device="cpu")
    built = build_executor(args, None, lambda responses: None, communicator)
    (release,) = communicator.releases
    pool = release.__self__  # type: ignore[attr-defined] # of a bound method
    assert isinstance(pool, GraphPool)
    pool._graphs.append(graph)
    with mock.patch.object(torch.cuda, "synchronize"):
        release()
    graph.reset.assert_called_once_with()
    del built


def test_a_group_parts_after_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    from tllm_spec.distributed.process_group import ProcessGroup

    order: list[str] = []
    group = ProcessGroup(MPI.COMM_SELF)
    monkeypatch.setattr(group._watch, "close", lambda: order.append("goodbye"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("ranks part"))
    group.before_close(lambda: order.append("first"))
    group.before_close(lambda: order.append("second"))
    group.close()
    assert order == ["first", "second", "ranks part", "goodbye"]


def test_a_rank_that_is_lost_when_python_ends_already_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 refuses threads then."""
    from tllm_spec.distributed import process_group

    class Ended(BaseException):
        """The process."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def end(status: int) -> None:
        assert status == process_group.FAILED
        raise Ended

    group = process_group.ProcessGroup(MPI.COMM_SELF)
    monkeypatch.setattr(process_group, "LAST_SECONDS", 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        group.abort("a reason")


@pytest.mark.parametrize("error", [NoPeerMemory("no access"), RuntimeError("out of memory")])
def test_only_what_all_ranks_have_agreed_on_is_a_reason_for_nccls_sums(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that goes on alone would measure other sums than the rest, or none."""
    from tllm_spec.distributed import process_group

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(process_group, "PeerSums", fail)
    group = process_group.ProcessGroup(MPI.COMM_SELF)
    if isinstance(error, NoPeerMemory):
        group._choose_sums(CPU)
        assert type(group._tensors) is Collectives
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            group._choose_sums(CPU)
    group.close()
