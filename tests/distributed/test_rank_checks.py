"""What ranks must have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.models.helpers import save_checkpoint
from tllm_spec import __version__
from tllm_spec.cli import serve
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.mpirun import undo_default_binding
from tllm_spec.distributed.rank_checks import ABSENT, checkpoints, fingerprint, mismatch, versions
from tllm_spec.ranks import join_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "Llama")
    return tmp_path


def _change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_copies_of_a_checkpoint_are_equal_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    first = fingerprint(str(folder))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    assert fingerprint(str(copy)) == first


@pytest.mark.parametrize("place", [-1, 100])
def test_weights_of_the_same_sizes_and_shapes_are_told_apart(folder: Path, place: int) -> None:
    first = fingerprint(str(folder))
    _change_byte(folder / "model.safetensors", place)
    assert fingerprint(str(folder)) != first


def test_another_config_is_another_checkpoint(folder: Path) -> None:
    first = fingerprint(str(folder))
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    assert fingerprint(str(folder)) != first


def test_what_drafts_are_made_with_is_compared(folder: Path) -> None:
    token_map = folder / "map.json"
    token_map.write_text("[1, 2]")
    first = fingerprint(str(token_map))
    spec: dict[str, Any] = {
        "decoding_type": "Draft_Target",
        "max_draft_len": 2,
        "speculative_model": "zoo:llama-draft",
        "speculative_token_map": str(token_map),
    }
    args = LlmArgs.from_kwargs(folder, tokenizer="zoo:llama", speculative_config=spec)
    compared = [str(folder), "zoo:llama", "zoo:llama-draft", str(token_map)]
    assert list(checkpoints(args)) == compared
    token_map.write_text("[1, 3]")
    assert fingerprint(str(token_map)) != first
    assert fingerprint(str(folder / "nowhere")) == ABSENT
    spec = {"decoding_type": "SA", "max_draft_len": 2, "external_corpus_path": str(token_map)}
    args = LlmArgs.from_kwargs(folder, tokenizer="zoo:llama", speculative_config=spec)
    assert list(checkpoints(args)) == [str(folder), "zoo:llama", str(token_map)]


def test_a_mismatch_names_every_difference_and_both_values() -> None:
    own = versions()
    assert own["tllm_spec"] == __version__ and own["torch"]
    assert mismatch([own, own], "the version of") is None
    problem = mismatch([own, own | {"torch": "1.0"}, own | {"llguidance": "0.1"}], "the version of")
    assert problem == (
        f"the version of torch is 1.0 on rank 1 and {own['torch']} on rank 0; the version of "
        f"llguidance is 0.1 on rank 2 and {own['llguidance']} on rank 0; all ranks need the same"
    )


# A rank that Open MPI has bound by default uses all CPUs; one that was bound on purpose stays on
# its own.


BOUND_BY_4 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_orte_bound_at_launch": "1"}
STARTED_BY_5 = {"OMPI_COMM_WORLD_RANK": "0", "PRTE_LAUNCHED": "1"}


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """All that this process may use; during a test it is bound to one of them."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux binds processes")
    for name in [each for each in os.environ if each.startswith(("OMPI_", "PRTE_", "PMI"))]:
        monkeypatch.delenv(name)
    found = os.sched_getaffinity(0)
    if len(found) == 1:
        pytest.skip("one CPU is all")
    os.sched_setaffinity(0, {max(found)})
    yield found
    os.sched_setaffinity(0, found)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_is_bound_by_default_uses_all_cpus_when_it_joins(
    cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, BOUND_BY_4)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # the next that is needed
    with pytest.raises(ValueError, match="needs the package mpi4py"):
        join_ranks(LlmArgs.from_kwargs("zoo:llama", tensor_parallel_size=2))
    assert os.sched_getaffinity(0) >= cpus


def test_a_server_uses_all_cpus_before_it_starts_its_other_processes(
    cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These inherit them."""
    set_variables(monkeypatch, BOUND_BY_4)
    monkeypatch.setattr(serve, "configure_logs", lambda *arguments: None)
    found: list[set[int]] = []
    monkeypatch.setattr(serve, "serve", lambda *arguments: found.append(os.sched_getaffinity(0)))
    CliRunner().invoke(serve.main, ["zoo:llama", "--port", "0", "--tp_size", "2"])
    assert found and found[0] >= cpus


@pytest.mark.parametrize(
    "asked",
    [
        {"OMPI_MCA_hwloc_base_binding_policy": "core"},
        {"OMPI_MCA_hwloc_base_bind_to_core": "1"},
        {"OMPI_MCA_hwloc_base_cpu_list": "0"},
        {"OMPI_MCA_hwloc_base_cpu_set": "0"},
        {"OMPI_MCA_rmaps_base_cpus_per_rank": "1"},
        {"OMPI_MCA_orte_rankfile": "ranks"},
        {"OMPI_MCA_rmaps_base_mapping_policy": "slot:pe=1"},
    ],
)
def test_a_binding_that_was_asked_for_stays(
    asked: dict[str, str], cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, BOUND_BY_4 | asked)
    undo_default_binding()
    assert os.sched_getaffinity(0) == {max(cpus)}


@pytest.mark.parametrize("mapping", ["core", "slot"])
def test_an_order_of_ranks_asks_for_no_binding(
    mapping: str, cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, BOUND_BY_4 | {"OMPI_MCA_rmaps_base_mapping_policy": mapping})
    undo_default_binding()
    assert os.sched_getaffinity(0) >= cpus


def test_a_rank_that_mpirun_has_not_bound_keeps_the_cpus_that_it_was_given(cpus: set[int]) -> None:
    undo_default_binding()
    assert os.sched_getaffinity(0) == {max(cpus)}


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"PRTE_MCA_hwloc_default_binding_policy": "core"}, False),
    ],
)
def test_rank_0_warns_where_it_cannot_know_who_has_bound_it(
    variables: dict[str, str],
    warns: bool,
    cpus: set[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With Open MPI 5."""
    set_variables(monkeypatch, STARTED_BY_5 | variables)
    undo_default_binding()
    assert os.sched_getaffinity(0) == {max(cpus)}
    assert ("mpirun --bind-to none" in caplog.text) == warns
