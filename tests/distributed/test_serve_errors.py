"""A server that mpirun starts in several processes ends all of them after a mistake that only the
first one finds, before it joins the others."""

import shutil
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.distributed.worlds import run
from tllm_spec.cli import serve
from tllm_spec.distributed.mpirun import find_mpiexec
from tllm_spec.server.supervisor import ServeError
from tllm_spec.zoo.registry import resolve_model


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
