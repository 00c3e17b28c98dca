"""Sliding windows through the engine, in all layers (Mistral) and in some (Qwen2): chains and trees
of drafts, prefix reuse, chunked prefill and preemption change no text of several windows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lossless.test_deepseek import (
    NGRAM,
    PLAIN,
    PROMPTS,
    SETTINGS,
    TREES,
    over_codes,
    texts,
)
from tests.models.helpers import save_checkpoint
from tests.models.tiny_eagle3 import write_tiny_eagle3

# A request has 43 tokens: six windows.
WINDOW = 7
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
BACKENDS = SETTINGS | {
    "no_overlap": SETTINGS["prefix_reuse"] | {"disable_overlap_scheduler": True},
    "triton": SETTINGS["prefix_reuse"] | {"attn_backend": "TRITON"},
}
HEAD = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1], "max_draft_len": 3}
DRAFTS = {"chain": {"max_draft_len": 5}} | TREES


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    options = {"max_position_embeddings": 128, "sliding_window": WINDOW}
    save_checkpoint(path, request.param, **(options | MODELS[request.param]))
    return path


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("head")
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}
    return write_tiny_eagle3(path, num_captured=2, **sizes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    found, _ = texts(folder, max_batch_size=1, **PLAIN)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


@pytest.mark.parametrize("setting", BACKENDS)
@pytest.mark.thinned(3)
def test_the_text_is_the_same_with_and_without_drafts_of_ngram(
    setting: str, folder: Path, plain: list[list[int]]
) -> None:
    without, _ = texts(folder, **BACKENDS[setting])
    assert without == plain
    found, acceptance_length = texts(folder, speculative_config=NGRAM, **BACKENDS[setting])
    assert found == plain
    assert acceptance_length > 1.1, "no draft was accepted"


@pytest.mark.parametrize("setting", ["triton", pytest.param("chunks", marks=pytest.mark.slow)])
def test_drafts_leave_the_text_over_an_fp8_cache_alone(setting: str, folder: Path) -> None:
    alone, _ = texts(folder, max_batch_size=1, **over_codes(PLAIN))
    found, acceptance_length = texts(
        folder, speculative_config=NGRAM, **over_codes(BACKENDS[setting])
    )
    assert found == alone
    assert acceptance_length > 1.1, "no draft was accepted"


@pytest.mark.parametrize("setting", BACKENDS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.thinned(8)
def test_the_target_as_its_own_draft_model_leaves_the_text_alone(
    drafts: str, one_model: bool, setting: str, folder: Path, plain: list[list[int]]
) -> None:
    """Its drafts are right, so that most windows of tokens are accepted."""
    own = {"decoding_type": "Draft_Target", "speculative_model": str(folder)}
    own |= {"draft_target_one_model": one_model} | DRAFTS[drafts]
    found, acceptance_length = texts(folder, speculative_config=own, **BACKENDS[setting])
    assert found == plain
    assert acceptance_length > 2.5


@pytest.mark.parametrize("setting", BACKENDS)
@pytest.mark.parametrize("one_model", [True, False])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.thinned(6)
def test_an_eagle3_head_leaves_the_text_alone(
    is_tree: bool, one_model: bool, setting: str, folder: Path, head: Path, plain: list[list[int]]
) -> None:
    own = HEAD | {"speculative_model": str(head), "eagle3_one_model": one_model}
    own |= TREES["dynamic"] if is_tree else {}
    found, _ = texts(folder, speculative_config=own, **BACKENDS[setting])
    assert found == plain


ON_GPU: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    **{f"draft_{name}": {"decoding_type": "Draft_Target"} | own for name, own in DRAFTS.items()},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("setting", ["undisturbed", "prefix_reuse", "chunks"])
@pytest.mark.parametrize("drafts", ON_GPU)
def test_a_gpu_with_cuda_graphs_gives_the_text_of_the_cpu(
    drafts: str, setting: str, folder: Path, plain: list[list[int]]
) -> None:
    own = ON_GPU[drafts]
    if drafts.startswith("draft"):
        own = (own or {}) | {"speculative_model": str(folder), "draft_target_one_model": True}
    options = {"device": "cuda", "dtype": "float32", "cuda_graph_config": {"batch_sizes": [1, 3]}}
    found, acceptance_length = texts(
        folder, speculative_config=own, **(SETTINGS[setting] | options)
    )
    assert found == plain
    assert not drafts.startswith("draft") or acceptance_length > 2.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_deterministic_gives_the_same_text_with_and_without_drafts(folder: Path) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    alone, _ = texts(folder, max_batch_size=1, **(SETTINGS["undisturbed"] | options))
    for own in (None, NGRAM):
        for setting in ("undisturbed", "chunks"):
            found, _ = texts(folder, speculative_config=own, **(SETTINGS[setting] | options))
            assert found == alone
