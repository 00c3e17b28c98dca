"""Models with FP8 weights: every drafter leaves the text of the target alone, and it is the text of
the dequantised weights."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tests.lossless.cases import (
    GPU_TOLERANCE,
    Case,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import DRAFT_MODEL, engine
from tests.lossless.oracle import Oracle
from tests.models.fp8_checkpoint import quantise
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

PLAIN: dict[str, Any] = {
    "kv_cache_config": {"enable_block_reuse": False},
    "disable_overlap_scheduler": True,
    "max_batch_size": 1,
}
MODES = ("plain", "ngram_tree", "draft_target", "eagle3", "eagle3_two_model", "eagle3_tree")
MTP = {"decoding_type": "MTP", "max_draft_len": 3}


def copied(model: str, folder: Path) -> Path:
    shutil.copytree(resolve_model(model), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the zoo's target, draft model and MTP model in FP8, and the target's own values."""
    root = tmp_path_factory.mktemp("fp8")
    for model in ("zoo:llama", DRAFT_MODEL, "zoo:deepseek"):
        quantise(copied(model, root / model.removeprefix("zoo:")))
    values = quantise(copied("zoo:llama", root / "plain"))
    shutil.copy(resolve_model("zoo:llama") / "config.json", root / "plain")
    save_file(values, root / "plain" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Case]) -> list[RequestOutput]:
    """The dequantised weights' answers, one request after the other."""
    with LLM(folder / "plain", **PLAIN) as llm:
        return generate(llm, requests, 1)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[[], Oracle]:
    @cache
    def get() -> Oracle:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32)
        return Oracle(model)

    return get


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode == "eagle3_tree" else pytest.mark.slow) for mode in MODES],
)
def test_the_text_is_that_of_the_dequantised_weights_with_every_drafter(
    mode: str,
    folder: Path,
    requests: list[Case],
    expected: list[RequestOutput],
    oracle: Callable[[], Oracle],
    fp8_on_cpu: Mock,
) -> None:
    options = engine(mode, 3)
    if mode == "draft_target":  # the draft model is in FP8, too
        options["speculative_config"]["speculative_model"] = str(folder / "llama-draft")
    with LLM(folder / "llama", max_batch_size=3, **options) as llm:
        found = generate(llm, requests, 3)
        llm.check_integrity()
    # Each model is asked for its need of memory, and when it is loaded.
    assert fp8_on_cpu.call_count == 2 * (1 + (mode == "draft_target"))
    for case, output, plain in zip(requests, found, expected, strict=True):
        assert_same(case, output, plain, oracle)
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.3


@pytest.mark.slow
def test_mtp_modules_in_fp8_leave_the_text_alone(
    folder: Path, requests: list[Case], fp8_on_cpu: Mock
) -> None:
    options: list[dict[str, Any]] = [PLAIN, {"max_batch_size": 3, "speculative_config": MTP}]
    texts = []
    for option in options:
        with LLM(folder / "deepseek", **option) as llm:
            found = generate(llm, requests, option["max_batch_size"])
        texts.append([each.outputs[0].token_ids for each in found])
    assert fp8_on_cpu.call_count == 3
    assert texts[0] == texts[1]
    stats = [each.speculative_decoding for each in found if each.speculative_decoding]
    assert max(each.acceptance_length for each in stats) > 1.3


@pytest.fixture(params=["bfloat16", "float32"])
def on_gpu(
    request: pytest.FixtureRequest, folder: Path, requests: list[Case]
) -> Iterator[tuple[str, list[RequestOutput]]]:
    options = {"dtype": request.param, "cuda_graph_config": None, "device": "cuda"}
    with LLM(folder / "llama", max_batch_size=1, **options) as llm:
        yield request.param, generate(llm, requests, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_drafts_leave_the_text_alone(
    mode: str,
    folder: Path,
    requests: list[Case],
    on_gpu: tuple[str, list[RequestOutput]],
    oracle: Callable[[], Oracle],
) -> None:
    dtype, alone = on_gpu
    options = {"dtype": dtype, "device": "cuda", "max_batch_size": 3}
    with LLM(folder / "llama", **options, **engine(mode, 3)) as llm:
        found = generate(llm, requests, 3)
    for case, output, plain in zip(requests, found, alone, strict=True):
        assert_same(case, output, plain, oracle, GPU_TOLERANCE[dtype], at_edges=dtype != "float32")
