"""Gemma 3 through the engine, with a window in three of four layers and two rotary embeddings:
every drafter, prefix reuse, chunked prefill and preemption change no text of several windows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.drafters import AdversarialDrafter
from tests.lossless.small_models import (
    NGRAM,
    PROMPTS,
    SETTINGS,
    TREES,
    assert_deterministic_texts_do_not_depend_on_drafts,
    plain_texts,
    texts,
)
from tests.models.helpers import VOCAB_SIZE
from tests.models.test_gemma3 import save_gemma3
from tests.models.tiny_eagle3 import write_tiny_eagle3

BACKENDS = SETTINGS | {"triton": SETTINGS["prefix_reuse"] | {"attn_backend": "TRITON"}}
DRAFT_MODEL: dict[str, Any] = {"decoding_type": "Draft_Target", "max_draft_len": 3}
HEAD: dict[str, Any] = {"decoding_type": "Eagle3", "max_draft_len": 3}
HEAD |= {"eagle3_layers_to_capture": [0, 2]}
TWO_MODEL = {"draft_target_one_model": False}
# With the least acceptance length of the best request: the target is its own draft model, and the
# head was not trained.
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {
    "ngram": (NGRAM, 1.1),
    "ngram tree": (NGRAM | TREES["dynamic"], 1.1),
    "sa": ({"decoding_type": "SA", "max_draft_len": 3}, 1.1),
    "user provided": ({"decoding_type": "User_Provided", "max_draft_len": 4}, 1.5),
    "draft model": (DRAFT_MODEL | {"draft_target_one_model": True}, 2.5),
    "draft model tree": (DRAFT_MODEL | TREES["dynamic"] | {"draft_target_one_model": True}, 2.5),
    "draft model, two-model": (DRAFT_MODEL | TWO_MODEL, 2.5),
    "draft model tree, two-model": (DRAFT_MODEL | TREES["static"] | TWO_MODEL, 2.5),
    "head": (HEAD, 1.0),
    "head tree": (HEAD | TREES["dynamic"], 1.0),
    "head, two-model": (HEAD | {"eagle3_one_model": False}, 1.0),
    "head tree, two-model": (HEAD | TREES["static"] | {"eagle3_one_model": False}, 1.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma3")
    save_gemma3(path, max_position_embeddings=128)
    return path


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("head")
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}
    return write_tiny_eagle3(path, num_captured=2, **sizes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    return plain_texts(folder)


def config_of(name: str, folder: Path, head: Path, plain: list[list[int]]) -> dict[str, Any]:
    config, _ = DRAFTERS[name]
    if config["decoding_type"] == "Eagle3":
        return config | {"speculative_model": str(head)}
    if config["decoding_type"] == "Draft_Target":
        return config | {"speculative_model": str(folder)}
    if config["decoding_type"] == "User_Provided":
        known = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=False)}
        return config | {"drafter": AdversarialDrafter(known, VOCAB_SIZE)}
    return config


@pytest.mark.parametrize("setting", BACKENDS)
def test_the_text_does_not_depend_on_batch_chunks_prefix_hits_and_preemption(
    setting: str, folder: Path, plain: list[list[int]]
) -> None:
    found, _ = texts(folder, **BACKENDS[setting])
    assert found == plain


@pytest.mark.parametrize("setting", BACKENDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(20)
def test_drafts_leave_the_text_alone(
    drafter: str, setting: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = config_of(drafter, folder, head, plain)
    found, acceptance_length = texts(folder, speculative_config=config, **BACKENDS[setting])
    assert found == plain
    assert acceptance_length >= DRAFTERS[drafter][1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    drafter: str | None, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    config = None if drafter is None else config_of(drafter, folder, head, plain)
    options = {"device": "cuda", "dtype": "float32", "cuda_graph_config": {"batch_sizes": [1, 3]}}
    found, _ = texts(folder, speculative_config=config, **(SETTINGS["chunks"] | options))
    assert found == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_deterministic_gives_the_same_text_with_and_without_drafts(folder: Path) -> None:
    assert_deterministic_texts_do_not_depend_on_drafts(folder)
