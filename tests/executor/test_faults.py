"""A fault belongs to one request: it gets a clear error, the others their right tokens, and all
pages come back."""

import random
from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from tests.executor.harness import all_pages_are_back, draft_target, user_provided
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import SamplingParams

NAN_TOKEN = 63
GOOD = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
# No good request may come across the token after which there are no numbers.
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logit_bias={NAN_TOKEN: -100.0})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("nan"), nan_token=NAN_TOKEN)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """The good requests' tokens when nothing goes wrong."""
    with make_llm(model) as llm:
        return tokens_of(generate(llm, GOOD, PARAMS))


@pytest.fixture(scope="module")
def finite_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that never proposes the token after which there are no numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("finite"), vocab_size=NAN_TOKEN)


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3}


@pytest.fixture(
    params=["plain", "no_overlap", "draft_target", "one_model", "tree", "one_model_tree"]
)
def llm(
    request: pytest.FixtureRequest, model: Path, tiny_draft: Path, finite_draft: Path
) -> Iterator[LLM]:
    options = {
        "plain": {},
        "no_overlap": {"disable_overlap_scheduler": True},
        "draft_target": draft_target(tiny_draft),
        "one_model": draft_target(finite_draft, draft_target_one_model=True),
        "tree": draft_target(tiny_draft, **TREE),
        "one_model_tree": draft_target(finite_draft, draft_target_one_model=True, **TREE),
    }[request.param]
    with make_llm(model, **options) as llm:
        yield llm
        assert_clean(llm)


def make_llm(model: Path, **options: Any) -> LLM:
    usual = {"skip_tokenizer_init": True, "max_batch_size": 8, "max_seq_len": 64}
    return LLM(model, **{**usual, **options})


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert not any(output.error for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def assert_clean(llm: LLM) -> None:
    """The executor lives, and no page or slot is held."""
    llm.check_integrity()
    assert llm.is_healthy
    assert all_pages_are_back(llm._executor)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [5] * 64,
            r"the prompt has 64 tokens; at most 63 are accepted, since an output needs one$",
        ),
        ([], "the prompt is empty"),
        ([1, 64], "ids 0 to 63"),
        ([-1], "ids 0 to 63"),
        ("text", "needs a tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_alone(
    llm: LLM, expected: list[list[int]], prompt: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate_async(prompt, PARAMS)
    first, bad, *others = generate(llm, [GOOD[0], prompt, *GOOD[1:]], PARAMS)
    assert bad.error is not None and bad.outputs[0].finish_reason == "error"
    assert tokens_of([first, *others]) == expected


@pytest.mark.covering
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [64]}, "stop_token_ids names token id 64"),
        ({"end_id": 64, "min_tokens": 1}, "end_id names token id 64"),
        ({"logit_bias": {99: 1.0}}, "logit_bias names token id 99"),
        ({"bad_token_ids": [[1, 70]]}, "bad_token_ids names token id 70"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"bad": "x"}, "needs a tokenizer"),
    ],
)
def test_parameters_that_name_tokens_or_rows_outside_the_model_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(GOOD[0], options)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("prompt", [[1, NAN_TOKEN, 2], [1, 2, NAN_TOKEN], [NAN_TOKEN]])
def test_a_prompt_whose_logits_are_nan_fails_alone(
    llm: LLM, expected: list[list[int]], prompt: list[int]
) -> None:
    for _ in range(2):  # the second time, some of its pages might have been left in the cache
        first, bad, *others = generate(llm, [GOOD[0], prompt, *GOOD[1:]], PARAMS)
        assert bad.error is not None and "NaN" in bad.error and not bad.outputs[0].token_ids
        assert tokens_of([first, *others]) == expected


def becoming_nan(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: the sixth token is NAN_TOKEN, whose successor has NaNs."""
    if len(tokens) == len(GOOD[0]) + 5:
        logits[NAN_TOKEN] += 1000.0
    return logits


def assert_only_the_doomed_fails(
    llm: LLM, doomed: SamplingParams, expected: list[list[int]]
) -> None:
    """The others have the texts that they have without it."""
    bad, *others = generate(llm, [GOOD[0], *GOOD], [doomed, PARAMS, PARAMS, PARAMS])
    assert bad.error is not None and "NaN" in bad.error
    assert len(bad.outputs[0].token_ids) == 6 and bad.outputs[0].token_ids[-1] == NAN_TOKEN
    assert tokens_of(others) == expected == tokens_of(generate(llm, GOOD, PARAMS))


@pytest.mark.thinned(3)
def test_a_request_whose_logits_become_nan_keeps_its_tokens_and_frees_its_pages(
    llm: LLM, expected: list[list[int]]
) -> None:
    bias = {NAN_TOKEN: -100.0}
    doomed = SamplingParams(max_tokens=24, logits_processor=becoming_nan, logit_bias=bias)
    assert_only_the_doomed_fails(llm, doomed, expected)


def test_on_a_tree_of_rejection_sampling_nan_fails_its_own_request(
    model: Path, finite_draft: Path
) -> None:
    rejection = {"use_rejection_sampling": True, "draft_target_one_model": True, **TREE}
    with make_llm(model, **draft_target(finite_draft, **rejection)) as llm:
        clean = tokens_of(generate(llm, GOOD, PARAMS))
        assert_only_the_doomed_fails(llm, replace(PARAMS, logits_processor=becoming_nan), clean)
        assert_clean(llm)


def raising(error: BaseException) -> Any:
    """A logits processor."""

    def processor(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 10:
            raise error
        return logits

    return processor


# What is raised to end a task, a program or a generator ends none here: the executor has a thread
# of its own.
ENDINGS = (CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("processor", "message", "num_tokens"),
    [
        (raising(LookupError("ten is enough")), "LookupError: ten is enough", 6),
        *((raising(ending("enough")), f"{ending.__name__}: enough", 6) for ending in ENDINGS),
        (lambda tokens, logits: logits[:5], "must return the logits, a tensor of shape", 0),
        (lambda tokens, logits: None, "must return the logits, a tensor of shape", 0),
        (lambda tokens, logits: logits * torch.nan, "no token can be chosen", 0),
    ],
)
def test_a_bad_logits_processor_fails_its_own_request(
    llm: LLM, expected: list[list[int]], processor: Any, message: str, num_tokens: int
) -> None:
    doomed = SamplingParams(max_tokens=24, logits_processor=processor)
    first, bad, *others = generate(
        llm, [GOOD[0], GOOD[0], *GOOD[1:]], [PARAMS, doomed, PARAMS, PARAMS]
    )
    assert bad.error is not None and message in bad.error and bad.outputs[0].length == num_tokens
    assert tokens_of([first, *others]) == expected


def test_huge_min_tokens_run_to_max_seq_len(tiny: Path, tiny_draft: Path) -> None:
    endless = SamplingParams(min_tokens=2**63, max_tokens=None, stop_token_ids=list(range(40)))
    with make_llm(tiny, **draft_target(tiny_draft)) as llm:
        alone = generate(llm, GOOD, PARAMS)
        longest, *others = generate(llm, GOOD[:1] + GOOD, [endless, PARAMS, PARAMS, PARAMS])
        assert tokens_of(others) == tokens_of(alone)
        assert len(tokens_of([longest])[0]) == 64 - len(GOOD[0])
        assert_clean(llm)


@pytest.mark.parametrize(("times", "num_failed"), [(1, 0), (3, 2), (10**9, 3)])
def test_a_drafter_that_raises_fails_only_the_requests_for_which_it_raises_alone(
    model: Path, expected: list[list[int]], times: int, num_failed: int
) -> None:
    calls = {"left": times}

    def propose(request: LlmRequest) -> list[int]:
        calls["left"] -= 1
        if calls["left"] >= 0:
            raise OSError("no drafts today")
        return [1]

    with make_llm(model, **user_provided(propose)) as llm:
        outputs = generate(llm, GOOD, PARAMS)
        assert_clean(llm)
    assert sum(output.error is not None for output in outputs) == num_failed
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.error == "OSError: no drafts today" or output.outputs[0].token_ids == tokens


class Unsayable(Exception):
    """Who asks what it says gets another."""

    def __str__(self) -> str:
        raise OSError("no words")


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (RuntimeError("not for this one"), "RuntimeError: not for this one"),
        (Unsayable(), "Unsayable: "),
        *((ending("enough"), f"{ending.__name__}: enough") for ending in ENDINGS),
        ([1] * 5, "proposed 5 tokens; max_draft_len is 4"),
        ([1, 64], "the model has token ids 0 to 63"),
        ([-1], "the model has token ids 0 to 63"),
        ([None], "the drafter proposed [None], which are no token ids"),
        ([1.0], "the drafter proposed [1.0], which are no token ids: "),
        (["a"], "the drafter proposed ['a'], which are no token ids: "),
        (7, "the drafter proposed 7, which are no token ids: "),
        (object(), "the drafter proposed <object object at"),
    ],
)
def test_a_drafter_that_fails_for_one_request_fails_that_one(
    model: Path, expected: list[list[int]], drafts: Any, message: str
) -> None:
    def propose(request: LlmRequest) -> Any:
        if request.tokens[:3] != GOOD[1]:
            return [1]
        if isinstance(drafts, BaseException):
            raise drafts
        return drafts

    with make_llm(model, **user_provided(propose)) as llm:
        first, bad, third = generate(llm, GOOD, PARAMS)
        assert_clean(llm)
    assert bad.error is not None and message in bad.error and len(bad.outputs[0].token_ids) == 1
    assert tokens_of([first, third]) == [expected[0], expected[2]]


def test_a_request_may_be_as_long_as_an_empty_pool_can_hold_and_no_longer(
    model: Path, expected: list[list[int]], tiny_draft: Path
) -> None:
    cache = {"tokens_per_block": 4, "max_tokens": 40}
    with make_llm(model, kv_cache_config=cache, **draft_target(tiny_draft)) as llm:
        long, unlimited = [1] * llm.max_seq_len, SamplingParams(ignore_eos=True)
        first, bad, full, *others = generate(
            llm, [GOOD[0], long, GOOD[0], *GOOD[1:]], [PARAMS, PARAMS, unlimited, PARAMS, PARAMS]
        )
        assert bad.error is not None and f"length is {llm.max_seq_len} tokens" in bad.error
        assert len(GOOD[0]) + full.outputs[0].length == llm.max_seq_len < 40
        assert full.outputs[0].finish_reason == "length"
        assert tokens_of([first, *others]) == expected
        assert_clean(llm)


@pytest.mark.thinned
@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_cancelling_at_random_moments_frees_everything_and_changes_no_other_text(
    model: Path, expected: list[list[int]], tiny_draft: Path, policy: str
) -> None:
    options = {
        "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 80},
        "scheduler_config": {"capacity_scheduler_policy": policy},
        "enable_chunked_prefill": True,
        "max_num_tokens": 20,
        "max_batch_size": 4,
    }
    chance = random.Random(11)
    with make_llm(model, **options, **draft_target(tiny_draft)) as llm:
        for _ in range(2):
            handles = [llm.generate_async(GOOD[i % 3], PARAMS) for i in range(12)]
            victims = chance.sample(range(12), 6)
            for index in victims:
                sleep(chance.random() * 0.01)
                handles[index].abort()
            results = [handle.result(timeout=30) for handle in handles]
            for index, result in enumerate(results):
                output, tokens = result.outputs[0], expected[index % 3]
                assert output.token_ids == tokens[: output.length] and result.error is None
                assert output.finish_reason == "length" or index in victims
            assert_clean(llm)
