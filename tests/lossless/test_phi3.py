"""Phi-3 through the engine, whose text crosses the original length of longrope: every drafter,
prefix reuse, chunked prefill and preemption change no text."""

from pathlib import Path

import pytest

from tests.lossless.small_models import SETTINGS, plain_texts, texts
from tests.lossless.test_gemma3 import DRAFTERS, config_of, head
from tests.models.test_phi3 import save

__all__ = ["head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("phi3")
    save(path, max_position_embeddings=128)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return plain_texts(folder)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(24)
def test_drafts_leave_the_text_alone(
    drafter: str, setting: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = config_of(drafter, folder, head, plain)
    if config["decoding_type"] == "Eagle3":
        config |= {"eagle3_layers_to_capture": [0, 1]}  # of two layers
    found, acceptance_length = texts(folder, speculative_config=config, **SETTINGS[setting])
    assert found == plain
    assert acceptance_length >= DRAFTERS[drafter][1]
