"""The equality suite on a GPU: the zoo in bfloat16 and float32, every way of drafting, CUDA graphs
and overlap.

Kernels add in another order for another number of rows, so two candidates that are nearly tied may
change places. Each such case is printed with its gap, and one above the tolerance fails.
`deterministic: true` has none (test_deterministic_gpu.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import pytest
import torch

from tests.draft_network.eager_network import EagerNetwork
from tests.lossless.cases import (
    GPU_TOLERANCE,
    Case,
    assert_same,
    fixed_length_cases,
    generate,
    heldout_prompts,
)
from tests.lossless.engines import ON_GPU, engine
from tests.lossless.oracle import GetOracle
from tests.lossless.test_equality import leave_prefixes
from tllm_spec.draft_network.network import Network, NetworkModel
from tllm_spec.draft_network.tensorrt import find_tensorrt
from tllm_spec.executor.building import draft_backend
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.llm import LLM
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.gpu

DRAFT_LENS = (3, 7)
ADAPTIVE = {"candidate_steps": [0, 1, 3]}

Reference = tuple[str, list[RequestOutput]]  # the device or type, and the texts there


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> list[Case]:
    return fixed_length_cases(tokenizer, heldout_prompts(tokenizer, 8, 150))


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def reference(request: pytest.FixtureRequest, requests: list[Case]) -> Reference:
    """Plain decoding, one request after the other, without graphs."""
    with LLM("zoo:llama", dtype=request.param, cuda_graph_config=None, max_batch_size=1) as llm:
        return request.param, generate(llm, requests, 1)


def check(reference: Reference, requests: list[Case], oracle: GetOracle, **options: Any) -> None:
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
    mode: str, draft_len: int, reference: Reference, requests: list[Case], oracle: GetOracle
) -> None:
    if mode == "plain" and draft_len != DRAFT_LENS[0]:
        pytest.skip("plain decoding has no drafts")
    check(reference, requests, oracle, **engine(mode, draft_len))


@pytest.mark.parametrize("mode", [mode for mode in ON_GPU if mode != "plain"])
def test_a_draft_length_that_follows_the_traffic_changes_no_text(
    mode: str, reference: Reference, requests: list[Case], oracle: GetOracle
) -> None:
    check(reference, requests, oracle, **engine(mode, 3, adaptive=ADAPTIVE))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("mode", ON_GPU)
def test_the_text_on_two_devices_is_that_of_one(
    mode: str, reference: Reference, requests: list[Case], oracle: GetOracle
) -> None:
    check(reference, requests, oracle, tensor_parallel_size=2, **engine(mode, 3))


# A draft model outside torch on a GPU: in TensorRT where the device is served, else its refusal;
# and everything but TensorRT with the same network definition run in torch.


SPECULATIONS = {
    "model": {"decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft"},
    "head": {
        "decoding_type": "Eagle3",
        "speculative_model": "zoo:llama-eagle3",
        "eagle3_one_model": False,
    },
}
OPTIONS = {"max_draft_len": 3, "draft_backend": "tensorrt"}


@pytest.fixture(params=SPECULATIONS)
def speculation(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SPECULATIONS[request.param] | OPTIONS


def why_not_served() -> str | None:
    try:
        find_tensorrt(torch.device("cuda"))
    except ValueError as error:
        return str(error)
    return None


def draft_backend_gpu_check(
    speculation: dict[str, Any], reference: Reference, requests: list[Case], oracle: GetOracle
) -> None:
    """Prompts in chunks next to windows, graphs and overlap, and a prefix of each prompt cached."""
    dtype, plain = reference
    options = {"max_num_tokens": 64, "enable_chunked_prefill": True, "max_batch_size": 3}
    with LLM("zoo:llama", dtype=dtype, speculative_config=speculation, **options) as llm:
        generate(llm, [Case("", case.prompt[:40], case.params) for case in requests[:3]], 3)
        outputs = generate(llm, requests, 3)
        llm.check_integrity()
        drafter, rounds = llm._executor.parts.drafter, llm._executor.parts.runner.graphs
        assert rounds is not None
        drafting = drafter.graphs if isinstance(drafter, ModelDrafter) else rounds.tails
        assert drafting is not None and drafting.captured
    for case, output, alone in zip(requests, outputs, plain, strict=True):
        assert_same(case, output, alone, oracle, GPU_TOLERANCE[dtype], at_edges=dtype == "bfloat16")
    stats = [output.speculative_decoding for output in outputs]
    assert sum(each.acceptance_length for each in stats if each) / len(stats) > 1.3


def test_an_engine_gives_plain_decodings_text(
    speculation: dict[str, Any], reference: Reference, requests: list[Case], oracle: GetOracle
) -> None:
    if reason := why_not_served():
        pytest.skip(reason)
    draft_backend_gpu_check(speculation, reference, requests, oracle)


def test_a_device_that_is_not_served_is_refused_with_its_compute_capability(
    speculation: dict[str, Any],
) -> None:
    if (reason := why_not_served()) is None:
        pytest.skip("TensorRT serves this device")
    with pytest.raises(ValueError) as refusal:
        LLM("zoo:llama", speculative_config=speculation)
    print(refusal.value)
    assert reason in str(refusal.value)


def test_the_definition_in_torch_drafts_in_cuda_graphs(
    speculation: dict[str, Any],
    reference: Reference,
    requests: list[Case],
    oracle: GetOracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_torch(model: NetworkModel, plan: BuildPlan) -> Network:
        return EagerNetwork(model)

    monkeypatch.setattr(Eagle3Head, "leave_fuse", lambda _: None)  # torch runs its layers
    monkeypatch.setattr(draft_backend, "find_tensorrt", lambda device: None)
    monkeypatch.setattr(draft_backend, "_tensorrt", in_torch)
    draft_backend_gpu_check(speculation, reference, requests, oracle)


# `deterministic: true` on a CUDA device: tokens, text and log probabilities are those of plain
# decoding of one request at a time, bit for bit. No near tie is tolerated here.


OUTPUT_LEN = 60
DTYPES = ("bfloat16", "float32")
NO_REUSE = {"enable_block_reuse": False}
NO_GRAPHS = {"cuda_graph_config": None}


@dataclass(frozen=True)
class Run:
    """One engine. `batch_size` requests are in flight, and as one ends the next one joins."""

    mode: str = "plain"
    draft_len: int = 0
    batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)


CHUNKS = {"enable_chunked_prefill": True, "max_num_tokens": 72}
PREEMPTS = {
    "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 640},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
}
RUNS = {
    "all at once": Run(),
    "joining one by one": Run(batch_size=3),
    "without graphs": Run(options=NO_GRAPHS),
    "without overlap": Run(batch_size=5, options={"disable_overlap_scheduler": True}),
    "in chunks": Run(options=CHUNKS),
    "in chunks, without graphs": Run(batch_size=3, options=CHUNKS | NO_GRAPHS),
    "with prefix hits": Run(options={"kv_cache_config": {"tokens_per_block": 16}}),
    "preempted": Run(options=PREEMPTS),
    **{f"ngram K={k}": Run("ngram", k) for k in (1, 3, 7)},
    **{f"eagle3 K={k}": Run("eagle3", k) for k in (1, 3, 7)},
    "eagle3 alone": Run("eagle3", 3, 1),
    "eagle3 joining, without graphs": Run("eagle3", 5, 3, NO_GRAPHS),
    "eagle3 in chunks": Run("eagle3", 3, 8, CHUNKS),
    "eagle3 with prefix hits": Run("eagle3", 3, 8, {"kv_cache_config": {"tokens_per_block": 16}}),
    "eagle3 preempted": Run("eagle3", 3, 8, PREEMPTS),
    "eagle3 two-model": Run("eagle3_two_model", 3),
}


@pytest.fixture(scope="module")
def deterministic_gpu_cases() -> list[Case]:
    """Twelve requests: greedy, seeded, seeded with a filter, and filters and a penalty, by turns.
    All of them ask for log probabilities."""
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1},
    )
    return [
        Case(
            f"{number}",
            prompt,
            SamplingParams(
                max_tokens=OUTPUT_LEN, ignore_eos=True, seed=number, logprobs=3, **ways[number % 4]
            ),
        )
        for number, prompt in enumerate(heldout_prompts(load_tokenizer("zoo:llama"), 12, 60))
    ]


@contextmanager
def deterministic_llm(dtype: str, run: Run) -> Iterator[LLM]:
    options = {
        "max_batch_size": 8,
        "kv_cache_config": NO_REUSE,
        "max_seq_len": 512,
        "cuda_graph_config": {"batch_sizes": [1, 4, 8]},
    }
    own = engine(run.mode, run.draft_len) | run.options
    with LLM("zoo:llama", device="cuda", dtype=dtype, deterministic=True, **(options | own)) as llm:
        yield llm
        llm.check_integrity()


@pytest.fixture(scope="module")
def plain(deterministic_gpu_cases: list[Case]) -> dict[str, list[RequestOutput]]:
    """By dtype: one request at a time, without graphs, overlap or reuse."""
    outputs = {}
    for dtype in DTYPES:
        alone = Run(batch_size=1, options=NO_GRAPHS | {"disable_overlap_scheduler": True})
        with deterministic_llm(dtype, alone) as llm:
            outputs[dtype] = generate(llm, deterministic_gpu_cases, 1)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNS)
def test_every_bit_is_plain_decodings(
    name: str,
    dtype: str,
    deterministic_gpu_cases: list[Case],
    plain: dict[str, list[RequestOutput]],
) -> None:
    run = RUNS[name]
    with deterministic_llm(dtype, run) as llm:
        if "with prefix hits" in name:
            leave_prefixes(llm, deterministic_gpu_cases)
        before = llm._executor.scheduler.num_preemptions
        outputs = generate(llm, deterministic_gpu_cases, run.batch_size)
        preempted = llm._executor.scheduler.num_preemptions > before
    assert preempted == ("preempted" in name)
    assert all(output.cached_tokens for output in outputs) == ("with prefix hits" in name)
    for case, output, expected in zip(deterministic_gpu_cases, outputs, plain[dtype], strict=True):
        ours, theirs = output.outputs[0], expected.outputs[0]
        assert output.error is None and len(ours.token_ids) == OUTPUT_LEN
        assert ours.token_ids == theirs.token_ids, case.name
        assert ours.text == theirs.text
        assert ours.logprobs == theirs.logprobs, case.name  # floats, compared as such
    if run.mode != "plain":
        drafted = [output.speculative_decoding for output in outputs]
        assert sum(stats.num_accepted_tokens for stats in drafted if stats is not None) > 0
