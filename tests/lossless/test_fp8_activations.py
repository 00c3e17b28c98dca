"""Models whose activations are quantised to FP8: every drafter leaves the text of plain decoding
alone."""

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.flips import flips
from tests.lossless.cases import (
    Case,
    NearTie,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import engine
from tests.lossless.oracle import Oracle
from tests.lossless.test_quantised_weights import PLAIN
from tests.models.fp8_checkpoint import quantise
from tests.models.fp8_transcription import transcribed
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.registry import resolve_model

MODES = ("plain", "ngram", "eagle3")
# One dynamic scale a token; for 128 inputs of it; static.
FORMATS = ("row", "deepseek", "modelopt")
BY_DEFAULT = (("deepseek", "eagle3"),)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The zoo's target in a format of FP8."""

    @cache
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("fp8") / "llama"
        shutil.copytree(resolve_model("zoo:llama"), folder)
        quantise(folder, granularity=name)
        return folder

    return get


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))[::3]


@pytest.fixture(scope="module")
def oracle_of(folder_of: Callable[[str], Path]) -> Callable[[str], Oracle]:
    @cache
    def get(name: str) -> Oracle:
        from transformers import AutoModelForCausalLM

        path = resolve_model("zoo:llama")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return Oracle(transcribed(model, folder_of(name)))

    return get


@pytest.fixture(scope="module")
def alone_of(
    folder_of: Callable[[str], Path], requests: list[Case]
) -> Callable[[str], list[RequestOutput]]:
    """Plain decoding, one request after the other."""

    @cache
    def get(name: str) -> list[RequestOutput]:
        with LLM(folder_of(name), **PLAIN) as llm:
            return generate(llm, requests, 1)

    return get


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in BY_DEFAULT else pytest.mark.slow)
        for name in FORMATS
        for mode in MODES
    ],
)
def test_every_drafter_leaves_the_text_alone(
    name: str,
    mode: str,
    requests: list[Case],
    folder_of: Callable[[str], Path],
    alone_of: Callable[[str], list[RequestOutput]],
    oracle_of: Callable[[str], Oracle],
) -> None:
    with LLM(folder_of(name), max_batch_size=3, **engine(mode, 3)) as llm:
        found = generate(llm, requests, 3)
        llm.check_integrity()
    for case, output, plain in zip(requests, found, alone_of(name), strict=True):
        assert_same(case, output, plain, lambda: oracle_of(name))
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.3


NUM_TEXTS, TEXT_LEN, BATCH = 64, 64, 8


def texts_of(folder: Path, cases: list[Case], mode: str, batch_size: int, **options: Any) -> Any:
    """The tokens of each text, `[texts, tokens]`, from a GPU."""
    with LLM(
        folder, max_batch_size=batch_size, dtype="bfloat16", device="cuda", **options,
        **engine(mode, 3),
    ) as llm:  # fmt: skip
        outputs = generate(llm, cases, batch_size)
        llm.check_integrity()
    return torch.tensor([output.outputs[0].token_ids for output in outputs])


@pytest.fixture(scope="module")
def many(tokenizer: Tokenizer) -> list[Case]:
    """Half of them greedy, half sampled."""
    prompts = heldout_prompts(tokenizer, NUM_TEXTS, 40)
    params = ({"temperature": 0.8 * (i % 2), "seed": i} for i in range(NUM_TEXTS))
    return [
        Case(str(i), prompt, SamplingParams(max_tokens=TEXT_LEN, ignore_eos=True, **own))
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_deterministic_texts_on_a_gpu_have_no_flips(
    mode: str, name: str, folder_of: Callable[[str], Path], many: list[Case]
) -> None:
    cases, options = many[:8], {"deterministic": True}
    expected = texts_of(folder_of(name), cases, "plain", 1, cuda_graph_config=None, **options)
    assert torch.equal(texts_of(folder_of(name), cases, mode, 3, **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_drafts_flip_no_more_tokens_than_another_batch_size_does(
    name: str, folder_of: Callable[[str], Path], many: list[Case]
) -> None:
    """By default the order of sums depends on the rows of a round, so texts part at near ties. A
    drafted round of BATCH requests has four times as many rows, so the plain rate is the larger one
    of two batch sizes: some kernels have the same bits for 1 and for 8 rows. The number of texts
    that part has a Poisson distribution; rates with drafts may be three deviations higher."""
    alone = texts_of(folder_of(name), many, "plain", 1)
    batches = (texts_of(folder_of(name), many, "plain", size) for size in (BATCH, 4 * BATCH))
    parted, tokens = max((flips(texts, alone) for texts in batches), key=lambda each: each[0])
    for mode in ("ngram", "eagle3"):
        found, until = flips(texts_of(folder_of(name), many, mode, BATCH), alone)
        message = (
            f"{name}: a text parts after {until / max(found, 1):.0f} tokens with {mode}, after "
            f"{tokens / max(parted, 1):.0f} with plain batches"
        )
        warnings.warn(message, NearTie, stacklevel=1)
        deviation = (max(found, 1) / until**2 + max(parted, 1) / tokens**2) ** 0.5
        assert found / until <= parted / tokens + 3 * deviation, message
