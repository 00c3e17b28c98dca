"""GLM-4.5 through the engine: its own further layer, and other drafters, leave the text alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.lossless.small_models import NGRAM, ON_GPU, SETTINGS, TREES, plain_texts, texts
from tests.models.mtp_reference import save_predictable

MTP: dict[str, Any] = {"decoding_type": "MTP", "max_draft_len": 3}
# With the least acceptance length of the best request.
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {
    "mtp": (MTP, 1.3),
    "mtp, two-model": (MTP | {"mtp_eagle_one_model": False}, 1.3),
    "mtp tree": (MTP | TREES["dynamic"], 1.3),
    "mtp, vanilla": (MTP | {"use_mtp_vanilla": True, "max_draft_len": 2}, 1.3),
    "ngram": (NGRAM, 1.1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("glm")
    save_predictable(path, num_modules=2, family="Glm4Moe")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return plain_texts(folder)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(8)
def test_drafts_leave_the_text_alone(
    drafter: str, setting: str, folder: Path, plain: list[list[int]]
) -> None:
    config, least = DRAFTERS[drafter]
    found, acceptance_length = texts(folder, speculative_config=config, **SETTINGS[setting])
    assert found == plain
    assert acceptance_length >= least


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    drafter: str | None, folder: Path, plain: list[list[int]]
) -> None:
    config = None if drafter is None else DRAFTERS[drafter][0]
    found, _ = texts(folder, speculative_config=config, **(SETTINGS["chunks"] | ON_GPU))
    assert found == plain
