"""What is refused before a rank is started, and how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.tiny_models import save_tiny
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.models.registry import check_shards
from tllm_spec.ranks import RANK, _end_with_ranks, join_ranks, mpiexec_script


class Started(Exception):
    """The ranks."""


class NotStarted(Exception):
    """By MPI."""


@pytest.fixture(autouse=True)
def mpi(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    def spawn(*args: Any) -> None:
        raise Started(*args)

    alone = SimpleNamespace(size=1, Spawn=spawn)
    info = SimpleNamespace(Create=dict)
    mpi = SimpleNamespace(COMM_WORLD=alone, COMM_SELF=alone, Info=info, Exception=NotStarted)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    return mpi


@pytest.mark.parametrize(
    ("model", "options", "problem"),
    [
        ("zoo:llama", {}, "vocab_size is 2048, which tensor_parallel_size 3 does not divide"),
        (
            "zoo:llama",
            {"tensor_parallel_size": 4},
            "num_attention_heads is 6, which tensor_parallel_size 4 does not divide",
        ),
        ("no/such/model", {}, "no/such/model"),
    ],
)
def test_a_model_that_the_ranks_cannot_share_is_refused_before_they_are_started(
    model: str, options: dict[str, Any], problem: str
) -> None:
    args = LlmArgs.from_kwargs(model, **{"tensor_parallel_size": 3, **options})
    with pytest.raises(ValueError, match=problem):
        join_ranks(args)


def test_ranks_are_started_for_a_model_that_they_can_share() -> None:
    with pytest.raises(Started) as started:
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))
    command, arguments, num_ranks, info = started.value.args
    assert (command, arguments[-1], num_ranks) == ("/bin/sh", "tllm_spec.ranks", 1)
    assert info == {"bind_to": "none"}


def test_ranks_that_mpi_cannot_start_are_an_error_in_one_sentence(mpi: SimpleNamespace) -> None:
    def spawn(*args: Any) -> None:
        raise NotStarted("unknown error")

    mpi.COMM_SELF.Spawn = spawn
    with pytest.raises(ValueError, match=r"could not start the other ranks \(unknown error\)"):
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))


def test_mpi4py_without_an_mpi_library_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutLibrary:
        @property
        def MPI(self) -> None:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mpi4py", WithoutLibrary())
    with pytest.raises(ValueError, match=r"needs an MPI library, .* pip install mpich") as refusal:
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))
    assert "libmpi" not in str(refusal.value)


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("taken", [[], [9], [9, 8, 6], [3, 4, 5, 6, 7, 8, 9]], ids=str)
def test_a_rank_has_the_fifo_of_rank_0_open_if_it_is_on_the_same_host(
    taken: list[int], is_here: bool, tmp_path: Path
) -> None:
    """Rank 0 notices its end by that, whichever MPI has started it. `taken`: descriptors that MPI
    has opened for the rank; if there is no other the rank goes without."""
    fifo, others = tmp_path / "started", tmp_path / "others"
    others.touch()
    if is_here:
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    opened = "; ".join(f"exec {number}< {others}" for number in taken) or ":"
    rank = f"{opened}; exec /bin/sh -c '{RANK}' {fifo} ls -l /proc/self/fd"
    found = subprocess.run(["/bin/sh", "-c", rank], capture_output=True, text=True, check=True)
    if is_here:
        os.close(reader)
    links = [line.split()[-3::2] for line in found.stdout.splitlines() if " -> " in line]
    assert [int(number) for number, target in links if target == str(others)] == sorted(taken)
    holders = [number for number, target in links if target == str(fifo)]
    assert len(holders) == (is_here and len(taken) < 7)
    assert fifo.exists() == is_here


def test_a_start_that_fails_before_it_can_be_watched_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised. The FIFO is gone when the thread that watches it comes to open it."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    _end_with_ranks(tmp_path / "started", threading.Event())
    assert not ends


def test_a_process_is_a_rank_of_one_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model goes on: torch's group of ranks is one for a process."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="is a rank of another model already"):
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-moe",
        "qwen3-moe",
        "mixtral",
        "llama4",
        "gemma3",
        "gemma4-experts",
        "gpt-oss",
        "deepseek-v3",
    ],
)
def test_the_sizes_of_every_family_are_checked_without_its_weights(
    family: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    folder = tmp_path / family
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    for ep_size in (1, 2):
        check_shards(folder, 2, ep_size)
    with pytest.raises(ValueError, match=r"is \d+, which tensor_parallel_size 3 does not divide"):
        check_shards(folder, 3, 1)


def test_mpiexec_has_the_fifo_open_and_no_input_although_ours_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = tmp_path / "a folder's name"
    spaced.symlink_to(Path(sys.executable).parent)
    monkeypatch.setattr(sys, "executable", str(spaced / Path(sys.executable).name))
    fifo, script = tmp_path / "started", tmp_path / "mpiexec"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script.write_text(mpiexec_script(str(fifo), "/bin/ls"))
    script.chmod(0o700)
    # The shell closes its input for the script, whose first open file would become it.
    shell = f"exec 0<&-; {script} -l /proc/self/fd"
    found = subprocess.run(["/bin/sh", "-c", shell], stdout=subprocess.PIPE, text=True, check=True)
    os.close(reader)
    links = dict(line.split(" -> ") for line in found.stdout.splitlines() if " -> " in line)
    by_number = {int(name.split()[-1]): target for name, target in links.items()}
    assert by_number[0] == os.devnull
    assert [number >= 10 for number, target in by_number.items() if target == str(fifo)] == [True]
