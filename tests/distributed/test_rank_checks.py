"""What ranks must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.helpers import save_checkpoint
from tllm_spec import __version__
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.rank_checks import ABSENT, checkpoints, fingerprint, mismatch, versions


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
