"""`deterministic: true` on a CUDA device: tokens, text and log probabilities are those of plain
decoding of one request at a time, bit for bit. No near tie is tolerated here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lossless.cases import Case, generate, heldout_prompts
from tests.lossless.engines import engine
from tests.lossless.test_equality import leave_prefixes
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.gpu
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
def cases() -> list[Case]:
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
def plain(cases: list[Case]) -> dict[str, list[RequestOutput]]:
    """By dtype: one request at a time, without graphs, overlap or reuse."""
    outputs = {}
    for dtype in DTYPES:
        alone = Run(batch_size=1, options=NO_GRAPHS | {"disable_overlap_scheduler": True})
        with deterministic_llm(dtype, alone) as llm:
            outputs[dtype] = generate(llm, cases, 1)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNS)
def test_every_bit_is_plain_decodings(
    name: str, dtype: str, cases: list[Case], plain: dict[str, list[RequestOutput]]
) -> None:
    run = RUNS[name]
    with deterministic_llm(dtype, run) as llm:
        if "with prefix hits" in name:
            leave_prefixes(llm, cases)
        before = llm._executor.scheduler.num_preemptions
        outputs = generate(llm, cases, run.batch_size)
        preempted = llm._executor.scheduler.num_preemptions > before
    assert preempted == ("preempted" in name)
    assert all(output.cached_tokens for output in outputs) == ("with prefix hits" in name)
    for case, output, expected in zip(cases, outputs, plain[dtype], strict=True):
        ours, theirs = output.outputs[0], expected.outputs[0]
        assert output.error is None and len(ours.token_ids) == OUTPUT_LEN
        assert ours.token_ids == theirs.token_ids, case.name
        assert ours.text == theirs.text
        assert ours.logprobs == theirs.logprobs, case.name  # floats, compared as such
    if run.mode != "plain":
        drafted = [output.speculative_decoding for output in outputs]
        assert sum(stats.num_accepted_tokens for stats in drafted if stats is not None) > 0
