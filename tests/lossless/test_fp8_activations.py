"""Models whose activations are quantised to FP8 by token: every drafter leaves the text of plain
decoding alone."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.lossless.cases import (
    Case,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import engine
from tests.lossless.oracle import Oracle
from tests.lossless.test_fp8 import PLAIN
from tests.models.fp8_checkpoint import quantise
from tests.models.fp8_transcription import transcribed
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

MODES = ("plain", "ngram", "eagle3")
# How far apart two candidates may be where texts part that are not deterministic. A sum in another
# order moves an activation to the next FP8 code, which is a sixteenth of its value away.
GPU_TOLERANCE_OF_FP8 = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's target in FP8, with a scale for each row."""
    folder = tmp_path_factory.mktemp("fp8") / "llama"
    shutil.copytree(resolve_model("zoo:llama"), folder)
    quantise(folder, granularity="row")
    return folder


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))[::3]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[[], Oracle]:
    @cache
    def get() -> Oracle:
        from transformers import AutoModelForCausalLM

        path = resolve_model("zoo:llama")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return Oracle(transcribed(model, folder))

    return get


@pytest.fixture(scope="module")
def exact_attention() -> Iterator[None]:
    """Attention in float64, rounded once. In float32 its last bits depend on the shape of the
    batch, which gives one of some 100,000 activations the next code, up to an eighth away, and
    moves logits by 0.1 or more. All else of a row is the same in every batch."""
    attend = F.scaled_dot_product_attention

    def attend_exactly(*tensors: Any, **options: Any) -> torch.Tensor:
        wide = [each if each is None else each.double() for each in tensors]
        return attend(*wide, **options).to(tensors[0].dtype)

    with patch.object(F, "scaled_dot_product_attention", attend_exactly):
        yield


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[Case], exact_attention: None) -> list[RequestOutput]:
    """Plain decoding, one request after the other."""
    with LLM(folder, **PLAIN) as llm:
        return generate(llm, requests, 1)


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode == "eagle3" else pytest.mark.slow) for mode in MODES],
)
def test_every_drafter_leaves_the_text_alone(
    mode: str,
    folder: Path,
    requests: list[Case],
    alone: list[RequestOutput],
    oracle: Callable[[], Oracle],
) -> None:
    with LLM(folder, max_batch_size=3, **engine(mode, 3)) as llm:
        found = generate(llm, requests, 3)
        llm.check_integrity()
    for case, output, plain in zip(requests, found, alone, strict=True):
        assert_same(case, output, plain, oracle)
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_drafts_leave_the_text_alone(
    mode: str,
    deterministic: bool,
    folder: Path,
    requests: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    options = {"dtype": "bfloat16", "device": "cuda", "deterministic": deterministic}
    with LLM(folder, max_batch_size=1, cuda_graph_config=None, **options) as llm:
        alone = generate(llm, requests, 1)
    with LLM(folder, max_batch_size=3, **options, **engine(mode, 3)) as llm:
        found = generate(llm, requests, 3)
    for case, output, plain in zip(requests, found, alone, strict=True):
        if deterministic:
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        else:
            assert_same(case, output, plain, oracle, GPU_TOLERANCE_OF_FP8, at_edges=True)
