"""Grammars that begin after reasoning, and budgets of reasoning: texts do not depend on
speculation, and have what the options say."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import user_provided
from tests.lossless.engines import MODES, engine
from tests.scripted_model import save_scripted
from tllm_spec.executor.request import LlmRequest
from tllm_spec.llm import LLM
from tllm_spec.llmapi import ThinkingBudgetLogitsProcessor, add_thinking_budget_logits_processor
from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import load_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
CLOSER = "</think>"

# In the zoo's target no marker is a token, and it never writes one by itself.


def rows() -> tuple[list[str], list[SamplingParams]]:
    """Prompts that have opened a section or not, and their parameters."""
    budgets: list[tuple[str, dict[str, Any]]] = [
        ("import os\n<think>", {"thinking_token_budget": 7}),
        ("def main(<think>", {"thinking_token_budget": 0, "temperature": 0.8}),
        ("class A:\n<think>\n", {"thinking_token_budget": 5, "guided_decoding": {"json": SCHEMA}}),
        ("x = <think>", {"thinking_token_budget": 2, "guided_decoding": {"choice": ["no", "yes"]}}),
        ("x = <think>", {"guided_decoding": {"json": SCHEMA}, "temperature": 1.0}),
        ("return [", {"guided_decoding": {"json": SCHEMA}, "thinking_token_budget": 3}),
        (
            "import re\n<think>",
            {
                "thinking_token_budget": 4,
                "min_tokens": 20,
                "stop": ["</think>", "ink"],
                "bad": ["</think>", ">"],
                "logit_bias": dict.fromkeys(range(40), -50.0),
                "frequency_penalty": 0.5,
            },
        ),
    ]
    params = [
        SamplingParams(**{"max_tokens": 56, "seed": number, **own})
        for number, (_, own) in enumerate(budgets)
    ]
    # The prompt's last token, a line end, opens a section.
    line = ThinkingBudgetLogitsProcessor(3, [202], [40, 41])
    params += [SamplingParams(max_tokens=56, seed=9, logits_processor=line)]
    return [*(prompt for prompt, _ in budgets), "import os\n"], params


def run(options: dict[str, Any]) -> list[RequestOutput]:
    prompts, params = rows()
    sizes = {"max_batch_size": 8, "max_seq_len": 160, "reasoning_parser": "qwen3"}
    with LLM("zoo:llama", **sizes, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(outputs, list) and not any(output.error for output in outputs)
    return outputs


@pytest.fixture(scope="module")
def plain() -> list[CompletionOutput]:
    return [output.outputs[0] for output in run(engine("plain", 0))]


def test_a_section_has_as_many_tokens_as_its_budget_and_then_its_closer(
    plain: list[CompletionOutput],
) -> None:
    with LLM("zoo:llama") as llm:
        assert llm.tokenizer is not None
        decode = partial(llm.tokenizer.decode, clean_up_tokenization_spaces=False)
    for row, number in ((0, 7), (1, 0), (2, 5), (3, 2), (6, 4)):
        output = plain[row]
        head = decode(output.token_ids[:number])
        if row == 0:  # its last token begins the closer
            assert head.endswith("<")
            head = head[:-1]
        assert output.text.startswith(head + CLOSER), (row, output.text)
        assert CLOSER not in head
    for row in (2, 5):
        value = json.loads(plain[row].text.split(CLOSER)[-1])
        assert value.keys() == {"name", "n"} and isinstance(value["n"], int)
    assert plain[7].token_ids[3:5] == [40, 41]
    assert plain[3].text.split(CLOSER)[1].strip() in ("no", "yes")
    assert plain[4].finish_reason == "length" and CLOSER not in plain[4].text
    assert len(plain[6].token_ids) >= 20


# The others are like one of these.
SHORT = ("eagle3_tree",)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode in SHORT else [pytest.mark.slow])
        for mode in MODES
        if mode != "plain"
    ],
)
def test_text_with_reasoning_does_not_depend_on_the_drafter(
    mode: str, plain: list[CompletionOutput]
) -> None:
    found = [output.outputs[0] for output in run(engine(mode, 5))]
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in plain]


def test_preempted_requests_count_from_their_text(plain: list[CompletionOutput]) -> None:
    tight: dict[str, Any] = {"kv_cache_config": {"max_tokens": 176, "tokens_per_block": 16}}
    tight["scheduler_config"] = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    outputs = run(engine("eagle3", 3) | tight)
    assert [each.outputs[0].token_ids for each in outputs] == [each.token_ids for each in plain]


# A model that writes one text, whose markers are tokens.

PIECES = ["<think>", " Let", " me", " see", CLOSER, "\n\n", '{"', "name", '": "', "x", '", "']
PIECES += ["n", '": ', "7", "}"]
TEXT = "".join(PIECES)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    template = "{{ messages[-1].content }}"
    return save_scripted(folder, {"<|go|>": PIECES}, template, special=["<think>", CLOSER])


Draft = Callable[[list[int], int], Any]  # of the rest of the text and of the longest draft


def right(rest: list[int], longest: int) -> list[int]:
    return rest[:longest]


def illegal(rest: list[int], longest: int) -> list[int]:
    """The text, with a wrong token after the closer and one that no grammar allows there."""
    return [token if number % 5 else 70 for number, token in enumerate(rest[:longest])]


def branches(rest: list[int], longest: int) -> list[list[int]]:
    """A tree: the right path between wrong ones."""
    path = rest[:longest]
    return [*([*path[:at], 70] for at in range(len(path))), path]


def nothing(rest: list[int], longest: int) -> list[int]:
    return []


def scripted_output(
    folder: Path, draft: Draft | None, params: dict[str, Any], prompt: str = "<|go|>"
) -> RequestOutput:
    """draft: None for plain decoding; else it sees the text that plain decoding has made."""
    given = {"max_tokens": 40, "skip_special_tokens": False} | params
    sizes: dict[str, Any] = {"max_seq_len": 128, "reasoning_parser": "qwen3"}
    options: dict[str, Any] = {}
    if draft is not None:
        text = scripted_output(folder, None, params, prompt).outputs[0].token_ids

        def propose(request: LlmRequest) -> Any:
            assert draft is not None
            return draft(text[request.num_output_tokens :], request.num_drafts_wanted)

        is_tree = draft in (branches, wrong_branches)
        tree = {"max_total_draft_tokens": 40} if is_tree else {}
        options = user_provided(propose, 12, max_rejected_rounds=None, **tree)
    with LLM(str(folder), **sizes, **options) as llm:
        output = llm.generate(prompt, given, use_tqdm=False)
        llm.check_integrity()
    assert isinstance(output, RequestOutput)
    return output


JSON = {"guided_decoding": {"json": SCHEMA}}
WITH_RULES = {
    "thinking_token_budget": 1,
    "stop": [CLOSER],
    "bad": [CLOSER],
    "min_tokens": 9,
    "logit_bias": {},
}
ANSWER = TEXT.split(CLOSER)[1]
# Parameters, and the text: without the end token.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a grammar": (JSON, TEXT),
    "a budget": ({"thinking_token_budget": 2}, f"<think> Let me{CLOSER}{ANSWER}"),
    "no reasoning": ({"thinking_token_budget": 0}, f"<think>{CLOSER}{ANSWER}"),
    "one token": ({"thinking_token_budget": 1}, f"<think> Let{CLOSER}{ANSWER}"),
    "a large budget": ({"thinking_token_budget": 4}, TEXT),
    "the whole section": ({"thinking_token_budget": 3}, TEXT),
    "both": (JSON | {"thinking_token_budget": 1}, f"<think> Let{CLOSER}{ANSWER}"),
    "rules against the closer": (WITH_RULES, f"<think> Let{CLOSER}{ANSWER}"),
    "a stop string in the closer": (
        {"thinking_token_budget": 1, "stop": ["</th", CLOSER]},
        f"<think> Let{CLOSER}{ANSWER}",
    ),
    "a stop string that comes by itself": ({"stop": CLOSER}, "<think> Let me see"),
}


@pytest.mark.covering
@pytest.mark.parametrize("draft", [None, right, illegal, branches, nothing])
@pytest.mark.parametrize("case", CASES)
def test_a_scripted_text_has_its_reasoning_and_its_answer(
    scripted: Path, case: str, draft: Draft | None
) -> None:
    params, text = CASES[case]
    output = scripted_output(scripted, draft, params)
    assert output.outputs[0].text.removesuffix("<|end|>") == text
    assert output.outputs[0].finish_reason == "stop"
    stats = output.speculative_decoding
    if draft in (right, branches):  # closer and first token of JSON come in one round
        length = min(5, len(output.outputs[0].token_ids))
        assert stats is not None and stats.acceptance_length >= length


@pytest.fixture(scope="module")
def ids(scripted: Path) -> dict[str, int]:
    return load_tokenizer(str(scripted)).get_vocab()


@pytest.mark.thinned
@pytest.mark.parametrize("draft", [right, nothing, branches])
def test_a_closer_of_several_tokens_is_proposed_as_drafts(
    scripted: Path, ids: dict[str, int], draft: Draft
) -> None:
    """The processor's markers are any tokens."""
    closer = [*range(60, 70)]
    processor = ThinkingBudgetLogitsProcessor(1, [ids["<think>"]], closer)
    params = {"logits_processor": processor, "max_tokens": 14}
    plain = scripted_output(scripted, None, params)
    output = scripted_output(scripted, draft, params)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].token_ids[2:12] == closer
    stats = output.speculative_decoding
    assert stats is not None and sum(stats.per_position_accepted) >= 9


def wrong_branches(rest: list[int], longest: int) -> list[list[int]]:
    return [[70] * longest, [71] * longest]


def test_a_tree_without_the_forced_token_gives_way_to_it(scripted: Path) -> None:
    params = {"thinking_token_budget": 1}
    output = scripted_output(scripted, wrong_branches, params)
    assert output.outputs[0].text.startswith(f"<think> Let{CLOSER}")
    stats = output.speculative_decoding
    assert stats is not None and sum(stats.per_position_accepted) == 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("draft", [right, None, nothing, illegal])
def test_a_second_section_counts_anew(
    scripted: Path, ids: dict[str, int], draft: Draft | None
) -> None:
    """The forced end leads to the opener again."""
    opener, me, see, start = ids[" Let"], ids[" me"], ids[" see"], ids["<think>"]
    processor = ThinkingBudgetLogitsProcessor(2, [opener], [65, start])
    output = scripted_output(scripted, draft, {"logits_processor": processor, "max_tokens": 17})
    section = [opener, me, see, 65, start]
    assert output.outputs[0].token_ids == [start, *section * 3, opener]


def test_tensorrt_llms_function_gives_the_markers_of_a_parser(
    scripted: Path, ids: dict[str, int]
) -> None:
    params = SamplingParams(max_tokens=9, thinking_token_budget=1)
    add_thinking_budget_logits_processor(params, "deepseek-r1", load_tokenizer(str(scripted)))
    with LLM(str(scripted)) as llm:  # without a reasoning parser
        output = llm.generate("<|go|>", params, use_tqdm=False)
    assert isinstance(output, RequestOutput)
    expected = [ids["<think>"], ids[" Let"], ids[CLOSER], ids["\n\n"]]
    assert output.outputs[0].token_ids[:4] == expected


@pytest.mark.parametrize(
    ("options", "params", "reason"),
    [
        ({}, {"thinking_token_budget": 3}, "thinking_token_budget = 3 needs reasoning_parser"),
        (
            {"reasoning_parser": "qwen3", "enable_in_reasoning": True},
            JSON | {"thinking_token_budget": 3},
            "thinking_token_budget = 3 and a grammar: this begins at the first token",
        ),
    ],
)
def test_a_budget_without_a_section_is_refused(
    scripted: Path, options: dict[str, Any], params: dict[str, Any], reason: str
) -> None:
    with LLM(str(scripted), **options) as llm, pytest.raises(ValueError, match=reason):
        llm.generate("<|go|>", params)


def test_a_format_that_is_not_known_is_refused(scripted: Path) -> None:
    with pytest.raises(ValueError, match=r"reasoning_parser = 'qwen9': deepseek_r1, .* are acc"):
        LLM(str(scripted), reasoning_parser="qwen9")


@pytest.mark.parametrize(
    "options",
    [{}, {"reasoning_parser": "qwen3", "structured_outputs_config": {"enable_in_reasoning": True}}],
)
def test_a_grammar_begins_at_the_first_token_without_a_parser_or_when_told_so(
    scripted: Path, options: dict[str, Any]
) -> None:
    with LLM(str(scripted), **options) as llm:
        output = llm.generate("<|go|>", JSON | {"max_tokens": 40}, use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert json.loads(output.outputs[0].text)["n"] is not None


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|go|><think>", " Let"),
        (f"<|go|><think>\n\n{CLOSER}\n\n", '{"'),
        ("<think>a<|go|>", "<think>"),  # of an earlier message
    ],
)
def test_the_prompt_says_whether_reasoning_is_opened_or_over(
    scripted: Path, prompt: str, begins: str
) -> None:
    output = scripted_output(scripted, right, JSON, prompt)
    assert output.outputs[0].text.startswith(begins)
    assert output.outputs[0].text.endswith(f"{ANSWER.strip()}<|end|>")
