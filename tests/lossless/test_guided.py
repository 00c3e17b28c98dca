"""Guided decoding: every text matches its grammar, and does not depend on speculation."""

import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.executor.harness import user_provided
from tests.lossless.engines import MODES, engine
from tests.lossless.json_schemas import matches, random_schema
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.outputs import CompletionOutput
from tllm_spec.request_errors import SLOW_GRAMMAR, RequestError
from tllm_spec.sampling_params import SamplingParams

pytest.importorskip("llguidance")
NUM_SCHEMAS, MANY_SCHEMAS = 4, 200
PROMPTS = ("import os\n", "def main(", "class A:\n    ", "{")


def requests(number: int) -> tuple[list[Any], list[SamplingParams], list[dict[str, Any]]]:
    """Greedy and sampled ones, some with penalties, and some without a grammar in between."""
    random = Random(number)
    schemas = [random_schema(random) for _ in range(number)]
    params = [
        SamplingParams(
            max_tokens=160,
            seed=i,
            temperature=(0.0, 0.8, 1.5)[i % 3],
            frequency_penalty=(0.0, 0.3)[i % 2],
            guided_decoding={"json": schema},
        )
        for i, schema in enumerate(schemas)
    ]
    return [PROMPTS[i % len(PROMPTS)] for i in range(number)], params, schemas


# Choices that begin with the same part of a character, or end with a character of several tokens.
HALF_CHARACTERS = (["day é", "day è"], ["日", "旧"], ["perhaps 😀"])
# The text "no", an end token, and another token, so that a drafter drafts the end.
NO_AND_END = [81, 82, 1, 0] * 12


def edges() -> tuple[list[Any], list[SamplingParams]]:
    """Prompts and parameters of short grammars: parts of characters, and ends that do not end the
    text."""
    short = [{"guided_decoding": {"choice": choice}} for choice in HALF_CHARACTERS]
    ends = [{"ignore_eos": True}, {"end_id": -1}, {"end_id": 202}]
    no = {"guided_decoding": {"choice": ["no", "yes"]}}
    params = [*short, *(end | no for end in ends)]
    prompts = ["The answer is "] * len(short) + [NO_AND_END] * len(ends)
    return prompts, [SamplingParams(max_tokens=12, **each) for each in params]


def run(options: dict[str, Any], number: int) -> list[CompletionOutput]:
    prompts, params, _ = requests(number)
    free = [SamplingParams(max_tokens=30, seed=5, temperature=0.7)] * 2
    edge_prompts, edge_params = edges()
    prompts += [*edge_prompts, "import re", "x = "]
    with LLM("zoo:llama", max_batch_size=8, max_seq_len=256, **options) as llm:
        outputs = llm.generate(prompts, params + edge_params + free, use_tqdm=False)
        llm.check_integrity()
        assert bool(llm._executor.scheduler.num_preemptions) == ("scheduler_config" in options)
    assert isinstance(outputs, list) and not any(output.error for output in outputs)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[CompletionOutput]:
    return run(engine("plain", 0), NUM_SCHEMAS)


def test_every_text_is_json_of_its_schema(plain: list[CompletionOutput]) -> None:
    _, _, schemas = requests(NUM_SCHEMAS)
    ended = [output.finish_reason == "stop" for output in plain[:NUM_SCHEMAS]]
    assert sum(ended) >= NUM_SCHEMAS - 2  # others may reach max_tokens
    for output, schema, has_ended in zip(plain[:NUM_SCHEMAS], schemas, ended, strict=True):
        assert not has_ended or matches(json.loads(output.text), schema), output.text


def test_short_grammars_end_where_they_should(plain: list[CompletionOutput]) -> None:
    short = plain[NUM_SCHEMAS : NUM_SCHEMAS + len(HALF_CHARACTERS)]
    for output, choice in zip(short, HALF_CHARACTERS, strict=True):
        assert output.text in choice and output.finish_reason == "stop"
    for output in plain[NUM_SCHEMAS + len(HALF_CHARACTERS) : -2]:
        assert output.token_ids[:3] == [81, 82, 1] and len(output.token_ids) == 12


# `tests/executor/test_guided_rounds.py` has both in its default run.
LONG_ONLY = (
    *("draft_target_one_model", "eagle3_two_model", "sa", "ngram", "draft_target"),
    *("draft_target_one_model_sa", "eagle3_two_model_sa", "peagle_two_model", "peagle_tree"),
    *("pard", "pard_two_model", "peagle", "eagle3", "ngram_tree"),
)


@pytest.mark.parametrize(
    ("mode", "overlap"),
    [
        pytest.param(mode, True, marks=[pytest.mark.slow] if mode in LONG_ONLY else [])
        for mode in MODES
        if mode != "plain"
    ]
    + [pytest.param("eagle3", False, marks=pytest.mark.slow)],
)
def test_guided_text_does_not_depend_on_the_drafter(
    mode: str, overlap: bool, plain: list[CompletionOutput]
) -> None:
    outputs = run(engine(mode, 3, overlap=overlap), NUM_SCHEMAS)
    assert [output.text for output in outputs] == [output.text for output in plain]
    assert [output.finish_reason for output in outputs] == [o.finish_reason for o in plain]


def test_guided_text_does_not_depend_on_a_users_tree(plain: list[CompletionOutput]) -> None:
    """Its right path lies between branches that the grammar often forbids."""

    def propose(request: LlmRequest) -> list[list[int]]:
        text = plain[texts[request.seed]].token_ids[request.num_output_tokens :]
        right = text[: request.num_drafts_wanted]
        wrong = [[*right[:i], (right[i] + 7) % 2048] for i in range(len(right))]
        return [*wrong, right]

    prompts, params, _ = requests(NUM_SCHEMAS)
    edge_prompts, edge_params = edges()
    params += [replace(each, seed=100 + i) for i, each in enumerate(edge_params)]
    texts = {each.seed: i for i, each in enumerate(params)}
    options = user_provided(propose, 3, max_total_draft_tokens=6, max_rejected_rounds=None)
    with LLM("zoo:llama", max_batch_size=8, max_seq_len=256, **options) as llm:
        outputs = llm.generate(prompts + edge_prompts, params, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(outputs, list)
    for output, expected in zip(outputs, plain, strict=False):
        assert output.error is None and output.outputs[0].text == expected.text
    for output in outputs[:NUM_SCHEMAS]:
        stats = output.speculative_decoding
        assert stats is not None and stats.acceptance_length > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_200_schemas_with_each_drafter(mode: str) -> None:
    _, _, schemas = requests(MANY_SCHEMAS)
    plain = run(engine("plain", 0), MANY_SCHEMAS)
    outputs = run(engine(mode, 4), MANY_SCHEMAS)
    assert [output.text for output in outputs] == [output.text for output in plain]
    for output, schema in zip(outputs, schemas, strict=False):
        assert output.finish_reason == "length" or matches(json.loads(output.text), schema)


def test_drafts_are_accepted_under_a_grammar() -> None:
    options = engine("eagle3", 3)
    with LLM("zoo:llama", **options) as llm:
        output = llm.generate("import os\n", {"max_tokens": 60, "guided_decoding": {"json": {}}})
    assert not isinstance(output, list)
    stats = output.speculative_decoding
    assert stats is not None and stats.acceptance_length > 1.1


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "mode", ["ngram", "ngram_tree", "eagle3", "eagle3_two_model", "eagle3_tree"]
)
def test_text_that_a_grammar_forces_is_drafted(mode: str) -> None:
    text = "def __init__(self, name, value):\n        self.name = name\n        self.value = value"
    with LLM("zoo:llama", **engine(mode, 4)) as llm:
        params = {"max_tokens": 60, "guided_decoding": {"choice": [text]}}
        output = llm.generate("class A:\n    ", params)
    assert not isinstance(output, list) and output.outputs[0].text == text
    stats = output.speculative_decoding
    assert stats is not None and stats.acceptance_length == 5  # all drafts of each round


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        ({"regex": "[a-c]{3,6}(-[0-9]{2})?"}, "[a-c]{3,6}(-[0-9]{2})?"),
        ({"choice": ["yes", "no", 'a "quoted" \\ one']}, 'yes|no|a "quoted" \\\\ one'),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_each_kind_of_grammar(guided: dict[str, Any], pattern: str) -> None:
    with LLM("zoo:llama", **engine("ngram", 3)) as llm:
        params = [{"seed": s, "temperature": 1.0, "max_tokens": 60} for s in range(4)]
        outputs = llm.generate(
            ["a = "] * 4, [SamplingParams(**p, guided_decoding=guided) for p in params]
        )
    assert isinstance(outputs, list)
    for output in outputs:
        text, reason = output.outputs[0].text, output.outputs[0].finish_reason
        assert reason == "length" or re.fullmatch(pattern, text, re.DOTALL), text


def test_preempted_and_reused_requests_keep_their_place_in_the_grammar(
    plain: list[CompletionOutput],
) -> None:
    tight = {"kv_cache_config": {"max_tokens": 272, "tokens_per_block": 16}}
    tight["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    outputs = run(engine("eagle3", 3) | tight, NUM_SCHEMAS)
    assert [output.text for output in outputs] == [output.text for output in plain]


AMBIGUOUS = "root ::= s\ns ::= [a-z ] | s s | s s s | s s s s"


@pytest.mark.thinned
@pytest.mark.parametrize("mode", ["plain", "ngram", "eagle3", "eagle3_tree"])
def test_a_slow_grammar_fails_its_own_requests_and_is_refused_from_then_on(mode: str) -> None:
    slow = SamplingParams(n=3, max_tokens=200, guided_decoding={"grammar": AMBIGUOUS})
    with LLM("zoo:llama", **engine(mode, 3)) as llm:
        outputs = llm.generate(["a", "b"], [slow, SamplingParams(max_tokens=5)])
        assert isinstance(outputs, list)
        assert outputs[0].error == SLOW_GRAMMAR
        assert outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 5
        with pytest.raises(RequestError, match="the grammar takes too long"):
            llm.generate("a", slow)
        llm.check_integrity()


def test_after_an_ignored_end_token_the_text_is_free() -> None:
    with LLM("zoo:llama") as llm:
        params = {"max_tokens": 12, "ignore_eos": True, "guided_decoding": {"choice": ["ab"]}}
        output = llm.generate("a = ", params)
    assert not isinstance(output, list)
    assert output.outputs[0].text.startswith("ab") and len(output.outputs[0].token_ids) == 12
