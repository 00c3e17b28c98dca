"""Where a text stands in its sections of reasoning, and which tokens a budget forces."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.grammar.walks import grammar_of_words
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammar.guided_decoding import GrammarSource, GuidedDecodingParams
from tllm_spec.grammar.structural_tags import NamedTokens
from tllm_spec.grammar.thinking_budget import Budget, Sections, ThinkingBudget
from tllm_spec.grammars import ReasoningRules, after_reasoning
from tllm_spec.sampling_params import SamplingParams, ThinkingBudgetLogitsProcessor
from tllm_spec.text.reasoning import ReasoningFormat
from tllm_spec.text.tokenizer import load_tokenizer

# Bytes, and words that are parts of markers, overlap with them, or cross their ends.
WORDS = [bytes([value]) for value in range(256)]
WORDS += [b"</", b"th", b"ink", b"ink>", b">a", b"x</t", b"<think", b"think>b"]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
TABLE = dict(enumerate(WORDS))
SPECIAL = 900


def sections(num_tokens: int, **options: Any) -> Sections:
    given = {"opener": ["<think>"], "closers": [["</think>"]], "section": "inside"}
    budget = Budget(**{"num_tokens": num_tokens, "has_grammar": False} | given | options)
    return Sections(budget, lambda: TABLE)


def ids(*words: str | int) -> list[int]:
    """A word of the vocabulary, or its bytes."""
    found = list[int]()
    for word in words:
        if isinstance(word, int):
            found.append(word)
        elif word.encode() in NUMBERS:
            found.append(NUMBERS[word.encode()])
        else:
            found += word.encode()
    return found


def forced_after(made: Sections, tokens: Sequence[int]) -> list[int]:
    """What is forced after the tokens, one after the other."""
    place = made.start
    for token in tokens:
        place = made.after(place, token)
    found = list[int]()
    while (token := made.forced(place)) is not None:
        found.append(token)
        place = made.after(place, token)
    return found


CLOSER = ids("</", "th", "ink>")


@pytest.mark.parametrize(
    ("num_tokens", "words", "forced"),
    [
        (0, [], CLOSER),
        (2, ["a"], []),
        (2, ["a", "b"], CLOSER),
        (3, ["a", "b", "</"], ids("th", "ink>")),  # it has begun by itself
        (3, ["a", "b", "x</t"], ids("h", "ink>")),
        (3, ["a", "b", "<"], ids("/", "th", "ink>")),
        (3, ["</", "th", "ink"], ids(">")),
        (3, ["</", "th", "ink>"], []),  # just in time
        (4, ["</", "th", "ink", ">a", "b", "c"], []),
        (4, ["<", "</", "x", "</"], ids("th", "ink>")),
        (3, ["</", "</", "</"], ids("th", "ink>")),
        (1, ["</", "th", "ink>", "<think>", "a"], CLOSER),
    ],
)
def test_after_the_budget_the_rest_of_the_closer_is_forced(
    num_tokens: int, words: list[str], forced: list[int]
) -> None:
    assert forced_after(sections(num_tokens), ids(*words)) == forced


def test_only_tokens_between_the_markers_count() -> None:
    made = sections(2, section="undecided")
    assert forced_after(made, ids("a", "b", "c", "d")) == []
    assert forced_after(made, ids("a", "<think", ">", "b")) == []
    assert forced_after(made, ids("a", "<think", ">", "b", "c")) == CLOSER
    assert forced_after(made, ids("a", "<", "think>b", "c")) == []
    assert forced_after(made, ids("a", "<", "think>b", "c", "d")) == CLOSER


def test_a_second_section_counts_anew_without_a_grammar_only() -> None:
    twice = ids("a", "</think>", "b", "<think>", "c", "d")
    assert forced_after(sections(2), twice) == CLOSER
    assert forced_after(sections(2), twice[:-1]) == []
    assert forced_after(sections(2, has_grammar=True), twice) == []
    assert forced_after(sections(0, has_grammar=True, section="over"), twice[-8:]) == []


def test_before_a_grammar_the_first_text_says_whether_there_is_a_section() -> None:
    made = sections(0, has_grammar=True, section="undecided")
    assert forced_after(made, ids("\n ", "<think>")) == CLOSER
    assert forced_after(made, ids("\n ", "a", "<think>")) == []
    assert forced_after(made, ids("<<think>")) == []


def test_a_marker_that_is_a_token_is_not_found_in_text() -> None:
    made = sections(2, closers=[[SPECIAL]], opener=[SPECIAL + 1])
    assert forced_after(made, ids("</think>")) == [SPECIAL]
    assert forced_after(made, ids("a", SPECIAL, "b", "c")) == []
    mixed = sections(1, closers=[[SPECIAL, "ink", SPECIAL + 2]])
    assert forced_after(mixed, ids("a")) == ids(SPECIAL, "ink", SPECIAL + 2)
    assert forced_after(mixed, ids(SPECIAL)) == ids("ink", SPECIAL + 2)


def test_a_call_ends_a_section() -> None:
    made = sections(3, closers=[["</think>"], ["<call>"]])
    assert forced_after(made, ids("a", "<", "c")) == CLOSER
    assert forced_after(sections(9, closers=[["</think>"], ["<call>"]]), ids("<call>abcdef")) == []


def test_a_closer_that_no_tokens_write_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens that write the end of reasoning"):
        Sections(Budget(1, ["a"], [["</think>"]], "inside", False), lambda: {1: b"</", 2: b"x"})


def test_drafts_are_the_forced_tokens_where_there_are_any() -> None:
    source = GrammarSource("thinking_budget", "")
    rules = ThinkingBudget(source, sections(2), None)
    a, b, c = ids("a", "b", "c")
    assert rules.better_drafts([a, b, c, c], 4) == [a, b, *CLOSER[:2]]
    assert rules.better_drafts([a, b, *CLOSER, c], 6) == [a, b, *CLOSER, c]
    assert rules.better_drafts([a], 4) == [a]
    assert rules.better_drafts([], 4) == []
    rules.read([c, a, b], 1)
    assert rules.better_drafts([], 2) == CLOSER[:2]
    assert rules.better_drafts([c, c, c, c], 4) == CLOSER


def test_each_row_of_a_tree_is_forced_by_the_text_before_it() -> None:
    rules = ThinkingBudget(GrammarSource("thinking_budget", ""), sections(1), None)
    a, second, third = ids("a", "th", "ink>")
    tokens = [0, a, CLOSER[0], second, CLOSER[0], third]
    bitmask = torch.full((6, 9), -1, dtype=torch.int32)
    forced = rules.fill(tokens, [-1, 0, 1, 2, 0, 3], bitmask)
    assert forced == {1: CLOSER[0], 2: second, 3: third, 4: second}
    assert (bitmask == -1).all()


def test_a_grammar_that_excludes_the_forced_token_comes_first() -> None:
    """In the middle of a character, where the closer is text."""
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "reasoning", "section": "inside", "begin": "<think>", "end": "</think>"},
                {"type": "const_string", "value": "yes"},
            ],
        },
    }
    pytest.importorskip("llguidance")
    grammar = GrammarState(grammar_of_words(GuidedDecodingParams(structural_tag=tag).source, WORDS))
    rules = ThinkingBudget(
        GrammarSource("thinking_budget", ""), sections(1, has_grammar=True), grammar
    )
    bitmask = torch.full((3, 9), -1, dtype=torch.int32)
    character = "é".encode()
    assert rules.fill([0, *character], [-1, 0, 1], bitmask) == {2: CLOSER[0]}


def test_a_budget_and_its_grammar_travel_as_text() -> None:
    budget = Budget(3, ["<a>"], [[5], ["b", 6]], "undecided", True)
    for grammar in (None, GrammarSource("regex", "a+")):
        assert Budget.of(budget.source(grammar)) == (budget, grammar)


GUIDED = {"json": {"type": "object"}}


@pytest.mark.parametrize(
    ("guided", "kind"),
    [
        (GUIDED, "json_schema"),
        ({"regex": "a|b"}, "regex"),
        ({"choice": ["a.b", "c d"]}, "regex"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
    ],
)
def test_after_reasoning_there_is_the_same_grammar(guided: Any, kind: str) -> None:
    source = GuidedDecodingParams(**guided).source
    form = ReasoningFormat("<t>", "</t>", ("<c>",))
    assert after_reasoning(source, form, "over") == source
    made = after_reasoning(source, form, "undecided")
    assert made.kind == "structural_tag"
    assert f'"type": "{kind}"' in made.text and '"section": "undecided"' in made.text


@pytest.mark.parametrize("number", [True, 2.0, -2, "3"])
def test_a_budget_is_an_integer(number: Any) -> None:
    with pytest.raises(ValueError, match="thinking_token_budget = "):
        SamplingParams(thinking_token_budget=number)
    with pytest.raises(ValueError, match="thinking_token_budget = "):
        ThinkingBudgetLogitsProcessor(number, [1], [2])


def test_minus_one_and_none_are_no_budget() -> None:
    rules = ReasoningRules(LlmArgs(model="zoo:llama"), load_tokenizer("zoo:llama"), 2048)
    for number in (-1, None):
        assert rules.source_of(SamplingParams(thinking_token_budget=number), [1]) is None
        processor = ThinkingBudgetLogitsProcessor(number, [1], [2])
        assert rules.source_of(SamplingParams(logits_processor=processor), [1]) is None


def test_the_prompt_says_whether_a_processors_section_is_open() -> None:
    rules = ReasoningRules(LlmArgs(model="zoo:llama"), None, 2048)
    params = SamplingParams(logits_processor=ThinkingBudgetLogitsProcessor(3, [7, 8], [9]))
    for prompt, section in (([7, 8, 1], "inside"), ([7, 8, 9], "undecided"), ([8], "undecided")):
        source = rules.source_of(params, prompt)
        assert source is not None and Budget.of(source)[0].section == section


def test_only_names_that_look_like_markers_are_tokens_of_literals() -> None:
    tokens = NamedTokens({"<think>": 5, "</think>": 6}, frozenset({6}))
    assert tokens.parts("a</think><think>") == ["a", 6, 5]
    assert tokens.parts("") == [""]
