"""gpt-oss through the engine, with sinks, a window in every second layer and experts in MXFP4:
every drafter, tier, chunk, prefix hit and preemption leaves texts of several windows alone, also
over an FP8 cache."""

from pathlib import Path

import pytest

from tests.lossless.small_models import NGRAM, ON_GPU, SETTINGS, over_codes, plain_texts, texts
from tests.lossless.test_adaptive import EVERY_ROUND
from tests.lossless.test_gemma3 import BACKENDS, DRAFTERS, config_of, head
from tests.models.gpt_oss import in_mxfp4, save_gpt_oss

__all__ = ["head"]

TIERS = {"adaptive": {"strategy": "ema", **EVERY_ROUND, 1: {"candidate_steps": [0, 1, 3]}}}
HOW = BACKENDS | {"no_overlap": SETTINGS["prefix_reuse"] | {"disable_overlap_scheduler": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gpt-oss")
    in_mxfp4(path, save_gpt_oss(path, max_position_embeddings=128))
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return plain_texts(folder)


@pytest.mark.parametrize("setting", HOW)
@pytest.mark.thinned(2)
def test_the_text_does_not_depend_on_batch_chunks_prefix_hits_and_preemption(
    setting: str, folder: Path, plain: list[list[int]]
) -> None:
    found, _ = texts(folder, **HOW[setting])
    assert found == plain


@pytest.mark.parametrize("setting", HOW)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(24)
def test_drafts_leave_the_text_alone(
    drafter: str, setting: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = config_of(drafter, folder, head, plain)
    found, acceptance_length = texts(folder, speculative_config=config, **HOW[setting])
    assert found == plain
    assert acceptance_length >= DRAFTERS[drafter][1]


@pytest.mark.parametrize("drafter", ["head", "draft model", "ngram"])
@pytest.mark.thinned(3)
def test_adaptive_tiers_leave_the_text_alone(
    drafter: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = config_of(drafter, folder, head, plain) | TIERS
    found, _ = texts(folder, speculative_config=config, **SETTINGS["prefix_reuse"])
    assert found == plain


@pytest.mark.parametrize("drafter", ["ngram tree", "draft model", "head"])
@pytest.mark.thinned(3)
def test_over_an_fp8_cache_drafts_leave_the_text_alone(
    drafter: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = config_of(drafter, folder, head, plain)
    alone, _ = texts(folder, max_batch_size=1, **over_codes(SETTINGS["undisturbed"]))
    options = over_codes(SETTINGS["preemption"])
    found, _ = texts(folder, speculative_config=config, **options)
    assert found == alone != plain


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    drafter: str | None, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = None if drafter is None else config_of(drafter, folder, head, plain)
    found, _ = texts(folder, speculative_config=config, **(SETTINGS["chunks"] | ON_GPU))
    assert found == plain


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["undisturbed", "chunks"])
def test_in_16_bits_deterministic_gives_the_same_text_with_and_without_drafts(
    setting: str, folder: Path
) -> None:
    options = ON_GPU | {"dtype": "bfloat16", "deterministic": True}
    alone, _ = texts(folder, max_batch_size=1, **(SETTINGS["undisturbed"] | options))
    for own in (None, NGRAM):
        found, _ = texts(folder, speculative_config=own, **(SETTINGS[setting] | options))
        assert found == alone
