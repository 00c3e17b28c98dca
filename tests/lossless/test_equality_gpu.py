"""The equality suite on a GPU: the zoo in bfloat16 and float32, every way of drafting, CUDA graphs
and overlap.

Kernels add in another order for another number of rows, so two candidates that are nearly tied may
change places. Each such case is printed with its gap, and one above the tolerance fails.
`deterministic: true` has none (test_deterministic_gpu.py)."""

from collections.abc import Callable
from itertools import compress
from typing import Any

import pytest
import torch

from tests.lossless.cases import (
    GPU_TOLERANCE,
    Case,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import ON_GPU, engine
from tests.lossless.oracle import Oracle
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

DRAFT_LENS = (3, 7)
ADAPTIVE = {"candidate_steps": [0, 1, 3]}


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 150))


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def reference(
    request: pytest.FixtureRequest, requests: list[Case]
) -> tuple[str, list[RequestOutput]]:
    """Plain decoding, one request after the other, without graphs."""
    with LLM("zoo:llama", dtype=request.param, cuda_graph_config=None, max_batch_size=1) as llm:
        return request.param, generate(llm, requests, 1)


def check(
    reference: tuple[str, list[RequestOutput]],
    requests: list[Case],
    oracle: Callable[[], Oracle],
    **options: Any,
) -> None:
    dtype, plain = reference
    if "tensor_parallel_size" in options:  # logits processors are code of one process
        served = [case.params.logits_processor is None for case in requests]
        requests, plain = [*compress(requests, served)], [*compress(plain, served)]
    with LLM("zoo:llama", dtype=dtype, max_batch_size=3, **options) as llm:
        outputs = generate(llm, requests, 3)
        llm.check_integrity()
    for case, output, alone in zip(requests, outputs, plain, strict=True):
        assert_same(case, output, alone, oracle, GPU_TOLERANCE[dtype], at_edges=dtype == "bfloat16")


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
@pytest.mark.parametrize("mode", ON_GPU)
def test_the_text_is_plain_decodings_of_one_request_alone(
    mode: str,
    draft_len: int,
    reference: tuple[str, list[RequestOutput]],
    requests: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    if mode == "plain" and draft_len != DRAFT_LENS[0]:
        pytest.skip("plain decoding has no drafts")
    check(reference, requests, oracle, **engine(mode, draft_len))


@pytest.mark.parametrize("mode", [mode for mode in ON_GPU if mode != "plain"])
def test_a_draft_length_that_follows_the_traffic_changes_no_text(
    mode: str,
    reference: tuple[str, list[RequestOutput]],
    requests: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    check(reference, requests, oracle, **engine(mode, 3, adaptive=ADAPTIVE))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("mode", ON_GPU)
def test_the_text_on_two_devices_is_that_of_one(
    mode: str,
    reference: tuple[str, list[RequestOutput]],
    requests: list[Case],
    oracle: Callable[[], Oracle],
) -> None:
    check(reference, requests, oracle, tensor_parallel_size=2, **engine(mode, 3))
