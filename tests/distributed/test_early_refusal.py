"""What is refused before a rank is started, and how it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.tiny_models import save_tiny
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.models.registry import check_shards
from tllm_spec.ranks import join_ranks


class Started(Exception):
    """The ranks."""


@pytest.fixture(autouse=True)
def popen(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **options: Any) -> None:
        raise Started(command, options)

    monkeypatch.setattr("tllm_spec.distributed.process_group.Popen", start)


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
    command, options = started.value.args
    assert command[-5:-2] == ["tllm_spec.ranks", "1", "2"]
    assert options["stdin"] == subprocess.DEVNULL and options["start_new_session"]
    assert command[-2:] == [str(each) for each in options["pass_fds"]]


def test_mpi4py_without_an_mpi_library_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutLibrary:
        @property
        def MPI(self) -> None:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", WithoutLibrary())
    with pytest.raises(ValueError, match=r"no MPI library, .* pip install mpich") as refusal:
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))
    assert "libmpi" not in str(refusal.value)


def test_a_process_is_a_rank_of_one_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model goes on: torch's group of ranks is one for a process."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="is a rank of another model already"):
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))


@pytest.mark.parametrize(
    "family", ["qwen2-moe", "qwen3-moe", "mixtral", "llama4", "gemma3", "gpt-oss", "deepseek-v3"]
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
