"""Experts that compute in FP8, or have 4 bits, through the engine: drafts, prefix reuse, chunked
prefill and preemption change no text."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from tests.lossless.small_models import (
    NGRAM,
    ON_GPU,
    SETTINGS,
    TREES,
    by_default,
    plain_texts,
    texts,
    write_head,
)
from tests.models.fp8_checkpoint import keeping_int4
from tests.models.fp8_checkpoint import quantise as in_fp8
from tests.models.helpers import save_checkpoint
from tllm_spec.zoo.quantise import Style, quantise

SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
# Activations with a scale a token, of blocks, and static; weights of 4 bits.
FORMATS = ("row", "deepseek", "modelopt", "awq", "mxfp4")
HEAD = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1], "max_draft_len": 3}
QUICK = [("deepseek", "chunks")]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("experts")
        save_checkpoint(folder, "Qwen3Moe", head_dim=16, norm_topk_prob=True, **SIZES)
        if name in ("awq", "mxfp4"):
            quantise(folder, Style(name))
        else:
            in_fp8(folder, granularity=name)
        return folder

    return get


@pytest.fixture(scope="module")
def plain_of(
    folder_of: Callable[[str], Path], exact_attention: None
) -> Callable[[str], list[list[int]]]:
    @cache
    def get(name: str) -> list[list[int]]:
        with keeping(name):
            return plain_texts(folder_of(name))

    return get


def keeping(name: str) -> object:
    return keeping_int4() if name in ("awq", "mxfp4") else nullcontext()


@pytest.mark.parametrize(("name", "setting"), by_default(QUICK, FORMATS, SETTINGS))
def test_the_text_is_the_same_with_and_without_drafts(
    name: str,
    setting: str,
    folder_of: Callable[[str], Path],
    plain_of: Callable[[str], list[list[int]]],
    tmp_path: Path,
) -> None:
    expected, options = plain_of(name), SETTINGS[setting]
    eagle = HEAD | {"speculative_model": str(write_head(tmp_path))} | TREES["dynamic"]
    for speculation in (None, NGRAM, eagle):
        with keeping(name):
            found, length = texts(folder_of(name), speculative_config=speculation, **options)
        assert found == expected
        assert length > 1.1 or speculation is not NGRAM, "no draft was accepted"


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_deterministic_texts_on_a_gpu_are_the_same_with_drafts(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    options = ON_GPU | {"dtype": "bfloat16", "deterministic": True} | SETTINGS["prefix_reuse"]
    expected, _ = texts(folder_of(name), **(options | {"max_batch_size": 1}))
    found, _ = texts(folder_of(name), speculative_config=NGRAM, **options)
    assert found == expected
