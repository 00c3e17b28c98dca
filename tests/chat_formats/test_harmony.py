"""Answers in Harmony's format: what the parser makes of a text does not depend on how it is split,
and what is malformed loses no text."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_formats.joined import joined
from tests.random_examples import examples
from tllm_spec.chat_formats.harmony import MARKS, MAX_HEADER, HarmonyParser, harmony_text
from tllm_spec.chat_formats.pieces import Arguments, CallStart, Piece, Reasoning, Text
from tllm_spec.outputs import CompletionOutput
from tllm_spec.text.tokenizer import load_tokenizer
from tllm_spec.text.vocabulary import NAMES, harmony_ends, harmony_tokens

FUNCTIONS = frozenset({"weather"})
WHOLE = (
    "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Let me look.<|end|>"
)
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"at": "Rome"}'
CALLED: list[Piece] = [CallStart("weather"), Arguments('{"at": "Rome"}')]
LONG = "x" * (2 * MAX_HEADER)
CASES: Sequence[tuple[str, list[Piece]]] = [
    ("<|channel|>final<|message|>Hi there", [Text("Hi there")]),
    (
        "<|channel|>analysis<|message|>I\nthink<|end|><|start|>assistant<|channel|>final<|message|>so",
        [Reasoning("I\nthink"), Text("so")],
    ),
    (
        f"{WHOLE}<|start|>assistant{CALL}<|call|>",
        [Reasoning("Need f."), Text("Let me look."), *CALLED],
    ),
    (' to=functions.weather<|channel|>commentary json<|message|>{"at": "Rome"}', CALLED),
    # A function's name alone, and one in the channel of reasoning.
    ('<|channel|>commentary to=weather<|message|>{"at": "Rome"}', CALLED),
    ('<|channel|>analysis to=functions.weather<|message|>{"at": "Rome"}', CALLED),
    # What is no function is the model's own business.
    ("<|channel|>commentary to=python<|message|>print(1)", [Reasoning("print(1)")]),
    ("<|channel|>final<|message|>a <|start|> b" + "<|end|>", [Text("a ")]),
    # Plain texts, short and long, and headers alone.
    ("just text", [Text("just text")]),
    (LONG, [Text(LONG)]),
    ("<|channel|>final so", [Text("so")]),
    ("<|channel|>analysis" + f" {LONG}", [Reasoning(LONG)]),
    ("<|channel|>ana", []),
    ("<|start|>assistant", []),
    ("", []),
    # No end, no start, two channels, two messages, a message without a channel.
    ("<|channel|>analysis<|message|>I<|channel|>final<|message|>so", [Reasoning("I"), Text("so")]),
    ("<|channel|>final<|message|>a<|message|>b", [Text("ab")]),
    ("<|channel|>final<|message|>a<|end|>b", [Text("ab")]),
    ("<|message|>so", [Text("so")]),
    ("<|channel|>analysis<|channel|>final<|message|>so", [Text("so")]),
    ("<|constrain|>json<|message|>{}", [Text("{}")]),
    ("<|end|><|end|><|return|>so", [Text("so")]),
    # A message of another role.
    (
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
        [Text("a"), Reasoning("b")],
    ),
]


def marked(text: str) -> str:
    for name, mark in MARKS.items():
        text = text.replace(name, mark)
    return text


def parsed(parts: Sequence[str], functions: frozenset[str] = FUNCTIONS) -> list[Piece]:
    parser = HarmonyParser(functions)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined(pieces + parser.finish())


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_every_split_of_a_text_gives_the_same_pieces(text: str, expected: list[Piece]) -> None:
    text = marked(text)
    assert parsed([text]) == expected
    assert parsed(list(text)) == expected
    for first in range(0, len(text), 7):
        for second in range(first, len(text), 11):
            parts = [text[:first], text[first:second], text[second:]]
            assert parsed(parts) == expected, parts


def test_without_tools_a_call_is_reasoning() -> None:
    assert parsed([marked(CALL)], frozenset()) == [Reasoning('{"at": "Rome"}')]


def test_text_and_arguments_are_given_out_as_they_come() -> None:
    parser = HarmonyParser(FUNCTIONS)
    assert parser.feed(marked("<|channel|>final<|message|>a")) == [Text("a")]
    assert parser.feed("b") == [Text("b")]
    parser = HarmonyParser(FUNCTIONS)
    assert parser.feed(marked(CALL)) == CALLED


WORDS = [
    *NAMES,
    *(
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.weather",
        " to=python",
        "json",
    ),
    *("x", " ", "\n", "{}", LONG),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@examples(100)
@given(text=TEXTS, data=st.data())
def test_any_text_is_read_the_same_whole_and_in_parts(text: str, data: st.DataObject) -> None:
    text = marked(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert parsed(parts) == parsed([text]) == parsed(list(text))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer: Any = load_tokenizer("zoo:llama")
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES)})
    return tokenizer


def test_marks_are_made_of_special_tokens_only_and_pieces_join_to_the_text(tokenizer: Any) -> None:
    tokens = harmony_tokens(tokenizer)
    assert sorted(tokens.values()) == sorted(NAMES) and not harmony_tokens(SimpleNamespace())
    assert {tokens[end] for end in harmony_ends(tokenizer)} == {"<|return|>", "<|call|>"}
    text = f"日本 <| channel|> {MARKS['<|end|>']}"
    ids = [*tokenizer.encode("<|channel|>final<|message|>"), *tokenizer.encode(text)]
    expected = marked("<|channel|>final<|message|>") + text[:-1] + "\N{REPLACEMENT CHARACTER}"
    for size in (1, 2, len(ids)):
        reader, output, found = harmony_text(tokenizer, tokens), CompletionOutput(0), ""
        for start in range(0, len(ids), size):
            output.token_ids += ids[start : start + size]
            found += reader.new(output)
        output.finish_reason = "stop"
        assert found + reader.new(output) == expected


def test_a_stop_string_is_left_out_also_where_a_token_has_only_a_part_of_it(tokenizer: Any) -> None:
    tokens = harmony_tokens(tokenizer)
    ids = tokenizer.encode("<|message|>return values")
    reader = harmony_text(tokenizer, tokens)
    output = CompletionOutput(0, "return va", ids, finish_reason="stop", stop_reason="lues")
    assert reader.new(output) == marked("<|message|>return va")
