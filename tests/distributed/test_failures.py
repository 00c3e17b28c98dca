"""What ends all ranks, and what does not."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from time import sleep

import pytest

from tests.distributed.worlds import REPOSITORY, World, mpirun, run, run_world, start
from tests.models.helpers import save_checkpoint

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
END_SECONDS = 10  # of all ranks, after one is lost


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
        output, _ = process.communicate(timeout=END_SECONDS)
        for _ in range(10 * END_SECONDS):
            if not any(map(is_running, ranks)):
                break
            sleep(0.1)
        assert not any(map(is_running, ranks))
    return process.returncode, output


def run_changed(change: str, change_folder: Path, *arguments: str) -> World:
    """The program, in whose processes `change` runs first."""
    (change_folder / "sitecustomize.py").write_text(change)
    path = os.pathsep.join([str(change_folder), str(REPOSITORY)])
    return run([sys.executable, *PROGRAM, *arguments], PYTHONPATH=path)


@pytest.mark.slow
def test_a_round_that_fails_on_all_ranks_fails_its_request_only(folder: str) -> None:
    world = run_world(2, [*PROGRAM, folder, "all"])
    assert world.returncode == 0, world.output
    assert "error MemoryError: no room for counts" in world.output
    assert "others [8, 8, 8, 8]" in world.output


def test_ranks_of_mpirun_serve_one_model_after_the_other(tmp_path: Path) -> None:
    """The second is one that no rank can load."""
    save_checkpoint(tmp_path, "Llama")
    (tmp_path / "model.safetensors").write_bytes(b"")
    world = run_world(2, ["-c", ONE_AFTER_THE_OTHER, str(tmp_path)])
    assert world.returncode == 0, world.output
    answers = [line for line in world.output.splitlines() if line.startswith("answer")]
    assert len(answers) == 2 and answers[0] == answers[1], world.output
    assert "refused" in world.output


def test_a_killed_rank_ends_the_model_that_started_it(folder: str) -> None:
    status, output = end_after_kill([sys.executable, *PROGRAM, folder, "none"], 1)
    assert status > 0, output
    assert "error rank 1 (process" in output and "all ranks end: rank 1" in output


@pytest.mark.slow
def test_a_rank_that_is_killed_before_it_joins_ends_the_model_that_started_it(
    folder: str, tmp_path: Path
) -> None:
    world = run_changed(KILLED_AT_ITS_START, tmp_path, folder, "none")
    assert world.returncode == 1 and "ended before it joined" in world.output, world.output


@pytest.mark.slow
def test_a_rank_that_is_killed_while_they_part_ends_the_model_that_started_it(
    folder: str, tmp_path: Path
) -> None:
    world = run_changed(KILLED_AT_ITS_END, tmp_path, folder, "ends")
    assert world.returncode == 1 and "all ranks end: rank 1" in world.output, world.output
    assert "others [8, 8, 8, 8]" in world.output


@pytest.mark.slow
def test_two_models_run_next_to_each_other_and_only_one_ends_with_its_rank(folder: str) -> None:
    """Their ports do not clash."""
    command = [sys.executable, *PROGRAM, folder, "none"]
    with serving(command) as (_, others):
        status, output = end_after_kill(command, 1)
        assert status > 0, output
        assert all(map(is_running, others)) and len(set(others)) == 2


@pytest.mark.slow
def test_a_killed_rank_ends_all_that_mpirun_started(folder: str) -> None:
    """mpirun ends the others, too, perhaps before they have written why."""
    status, output = end_after_kill(mpirun(2, [*PROGRAM, folder, "none"]), 1)
    assert status != 0 and re.search(r"rank 1 \(process|signal 9", output), output


@pytest.mark.slow
@pytest.mark.parametrize("by_mpirun", [False, True])
def test_the_other_ranks_end_after_rank_0_is_killed(folder: str, by_mpirun: bool) -> None:
    program = [*PROGRAM, folder, "none"]
    status, _ = end_after_kill(mpirun(2, program) if by_mpirun else [sys.executable, *program], 0)
    assert status != 0


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_and_names_it(folder: str) -> None:
    world = run_world(2, [*PROGRAM, folder, "one"])
    assert world.returncode != 0
    assert "error rank 1 (process" in world.output, world.output
    assert "has ended: MemoryError: no room for counts" in world.output


@pytest.mark.slow
def test_another_number_of_processes_than_asked_for_is_refused(folder: str) -> None:
    world = run_world(3, [*PROGRAM, folder, "none"])
    assert world.returncode != 0
    assert "tensor_parallel_size = 2, and mpirun has started 3 processes" in world.output


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
