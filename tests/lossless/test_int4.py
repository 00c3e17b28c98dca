"""Models with 4-bit weights: every drafter leaves the text of the target alone, and it is the text
of the dequantised weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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
from tests.lossless.test_fp8 import PLAIN, copied
from tests.models.int4_checkpoint import keeping_int4
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.zoo.quantise import Style, quantise

MODES = ("plain", "ngram", "ngram_tree", "draft_target", "eagle3", "eagle3_tree")
BY_DEFAULT = ("eagle3",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's target and draft model in 4 bits, and the target's own values."""
    root = tmp_path_factory.mktemp("int4")
    values = quantise(copied("zoo:llama", root / "llama"), Style("gptq", is_ordered=True))
    quantise(copied(DRAFT_MODEL, root / "draft"), Style("awq"))
    copied("zoo:llama", root / "plain")
    save_file(values, root / "plain" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 60))[::2]


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Case]) -> list[RequestOutput]:
    """What the dequantised weights give, one request after the other."""
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


def options_of(mode: str, folder: Path) -> dict[str, Any]:
    options = engine(mode, 3)
    if mode == "draft_target":  # the draft model has 4 bits, too
        options["speculative_config"]["speculative_model"] = str(folder / "draft")
    return options


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode in BY_DEFAULT else pytest.mark.slow) for mode in MODES],
)
def test_the_text_is_that_of_the_dequantised_weights_with_every_drafter(
    mode: str,
    folder: Path,
    requests: list[Case],
    expected: list[RequestOutput],
    oracle: Callable[[], Oracle],
) -> None:
    with (
        keeping_int4() as asked,
        LLM(folder / "llama", max_batch_size=3, **options_of(mode, folder)) as llm,
    ):
        found = generate(llm, requests, 3)
        llm.check_integrity()
    # To know the size of the weights and to load them.
    assert asked.call_count == 2 * (1 + (mode == "draft_target"))
    for case, output, plain in zip(requests, found, expected, strict=True):
        assert_same(case, output, plain, oracle)
    if mode != "plain":
        stats = [each.speculative_decoding for each in found if each.speculative_decoding]
        assert max(each.acceptance_length for each in stats) > 1.2


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
    with LLM(folder / "llama", max_batch_size=1, cuda_graph_config=None, **options) as llm:
        alone = generate(llm, requests, 1)
    with LLM(folder / "llama", max_batch_size=3, **options, **options_of(mode, folder)) as llm:
        found = generate(llm, requests, 3)
    for case, output, plain in zip(requests, found, alone, strict=True):
        if deterministic:
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert_same(case, output, plain, oracle, GPU_TOLERANCE["bfloat16"], at_edges=True)
