"""Every drafter, way of sampling, cache situation and batch size produces plain decoding's tokens.

The ways of sampling are mixed within the batches: a request's text must not depend on its neighbours either.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from tests.lossless.cases import OUTPUT_LEN, Case, assert_same, generate
from tests.lossless.drafters import AdversarialDrafter, expected_rounds
from tests.lossless.oracle import Oracle
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput, SpeculativeStats
from tllm_spec.sampling_params import SamplingParams

DRAFT_LEN = 4
DRAFTERS = ("ngram", "draft_target", "user_provided")
NO_REUSE = {"enable_block_reuse": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "undisturbed": {"kv_cache_config": NO_REUSE},
    # Room for eight windows and a few prompt tokens: prompts come in many pieces beside generating requests.
    "chunked_prefill": {"kv_cache_config": NO_REUSE, "enable_chunked_prefill": True, "max_num_tokens": 50},
    "prefix_reuse": {"kv_cache_config": {"tokens_per_block": 16}},
    "prefix_reuse_and_chunks": {
        "kv_cache_config": {"tokens_per_block": 32},
        "enable_chunked_prefill": True,
        "max_num_tokens": 12,
    },
    "preemption_of_3": {"kv_cache_config": {"tokens_per_block": 16, "max_tokens": 560}},
    "preemption_of_8": {"kv_cache_config": {"tokens_per_block": 16, "max_tokens": 1200}},
}
# A request that is alone always fits, so it is never preempted; and what it finds in the cache and what it prefills in
# pieces does not depend on others, so for it one run does both.
BATCH_SIZES = {
    "undisturbed": (1, 3, 8),
    "chunked_prefill": (3, 8),
    "prefix_reuse": (3, 8),
    "prefix_reuse_and_chunks": (1,),
    "preemption_of_3": (3,),
    "preemption_of_8": (8,),
}
RUNS = [
    pytest.param(engine, batch_size, id=f"{'-'.join(engine)}-{batch_size}")
    for engine in product(DRAFTERS, SETTINGS)
    for batch_size in BATCH_SIZES[engine[1]]
]


def speculative_config(drafter: str, known: AdversarialDrafter) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "ngram": {"decoding_type": "NGram", "max_matching_ngram_size": 3},
        "draft_target": {"decoding_type": "Draft_Target", "speculative_model": "zoo:llama-draft"},
        "user_provided": {"decoding_type": "User_Provided", "drafter": known},
    }
    return own[drafter] | {"max_draft_len": DRAFT_LEN}


@pytest.fixture(scope="module")
def llm(
    request: pytest.FixtureRequest, cases: list[Case], known_texts: dict[tuple[int, ...], list[int]]
) -> Iterator[LLM]:
    drafter, setting = request.param
    known = AdversarialDrafter(known_texts)
    options = SETTINGS[setting] | {
        "speculative_config": speculative_config(drafter, known),
        "max_batch_size": 8,
    }
    if setting.startswith("preemption"):
        options["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    with LLM("zoo:llama", **options) as llm:
        if setting.startswith("prefix_reuse"):
            leave_prefixes(llm, cases)
        yield llm


def leave_prefixes(llm: LLM, cases: list[Case]) -> None:
    """Fills the cache with the prompts, all but their last twenty tokens: some whole pages and a part of one."""
    first_token = SamplingParams(max_tokens=1)
    llm.generate([[*case.prompt[:-20], 2] for case in cases], first_token, use_tqdm=False)


@pytest.mark.parametrize(("llm", "batch_size"), RUNS, indirect=["llm"])
def test_the_text_is_plain_decodings(
    request: pytest.FixtureRequest,
    llm: LLM,
    batch_size: int,
    cases: list[Case],
    plain: list[RequestOutput],
    oracle: Callable[[], Oracle],
) -> None:
    drafter, setting = request.node.callspec.params["llm"]
    preemptions = llm._executor.scheduler.num_preemptions
    outputs = generate(llm, cases, batch_size)
    llm.check_integrity()
    for case, output, expected in zip(cases, outputs, plain, strict=True):
        assert_same(case, output, expected, oracle)
    assert all(output.outputs[0].length == OUTPUT_LEN for output in outputs[:8])
    preempted = llm._executor.scheduler.num_preemptions > preemptions
    assert preempted == setting.startswith("preemption")
    found = [output.cached_tokens for output in outputs]
    assert all(found) == any(found) == setting.startswith("prefix_reuse")
    assert_speculated(drafter, outputs, plain, undisturbed=not preempted)


def assert_speculated(
    drafter: str, outputs: list[RequestOutput], plain: list[RequestOutput], *, undisturbed: bool
) -> None:
    """There were drafts, and they were accepted as often as they were right."""
    total = sum((output.speculative_decoding or SpeculativeStats() for output in outputs), SpeculativeStats())
    assert total.acceptance_length > {"ngram": 1.02, "draft_target": 1.5, "user_provided": 2.0}[drafter]
    if drafter == "user_provided" and undisturbed:
        for output, expected in zip(outputs[:8], plain, strict=False):
            if output.outputs[0].token_ids == expected.outputs[0].token_ids:
                stats = output.speculative_decoding
                assert stats is not None
                counted = (stats.rounds, stats.num_drafted_tokens, stats.num_accepted_tokens)
                assert counted == expected_rounds(OUTPUT_LEN, DRAFT_LEN)
