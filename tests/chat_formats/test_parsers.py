"""Parsers of calls and reasoning: what they make of a text does not depend on how it is split."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_formats.joined import joined
from tests.random_examples import examples
from tllm_spec.chat_formats.deepseek import DeepSeekCalls
from tllm_spec.chat_formats.llama import LlamaJsonCalls, PythonicCalls
from tllm_spec.chat_formats.names import REASONING, TOOLS
from tllm_spec.chat_formats.pieces import (
    Arguments,
    CallStart,
    ForcedCall,
    ForcedCalls,
    NewParser,
    Parser,
    Piece,
    PlainText,
    Reasoning,
    Text,
)
from tllm_spec.chat_formats.qwen import HERMES
from tllm_spec.chat_formats.reasoning import ReasoningParser
from tllm_spec.text.reasoning import Section

ARGUMENTS = '{"city": "a\\"}{ é", "days": [1, {"x": 2}]}'
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
LLAMA = CALL.replace('"arguments"', '"parameters"')
CALLED: list[Piece] = [CallStart("f"), Arguments(ARGUMENTS)]
LATE = '{"arguments": {"a": 1}, "name": "g"}'
LATE_CALLED: list[Piece] = [CallStart("g"), Arguments('{"a": 1}')]
OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
V3 = f"{OPEN}function{SEP}f\n```json\n{ARGUMENTS}\n```{CLOSE}"
V31 = f"{OPEN}f{SEP}{ARGUMENTS}{CLOSE}"


def HermesCalls() -> Parser:
    return HERMES.new_parser(())


def with_reasoning(name: str | None, answer: NewParser, section: Section) -> NewParser:
    if name is None:
        return answer
    return lambda: ReasoningParser(answer(), REASONING[name], section)


def r1() -> NewParser:
    return with_reasoning("deepseek_r1", PlainText, "inside")


def qwen() -> NewParser:
    return with_reasoning("qwen3", HermesCalls, "undecided")


CASES: Sequence[tuple[NewParser, str, list[Piece]]] = [
    (HermesCalls, "a < b <tool", [Text("a < b <tool")]),
    (HermesCalls, f"Hi \n<tool_call>\n{CALL}\n</tool_call>", [Text("Hi"), *CALLED]),
    (
        HermesCalls,
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{LATE}</tool_call>\n bye ",
        [*CALLED, *LATE_CALLED, Text("bye ")],
    ),
    (HermesCalls, "<tool_call>{1}</tool_call>\n x", [Text("<tool_call>{1}</tool_call>\n x")]),
    (HermesCalls, f"<tool_call>{{1}}<tool_call>{CALL}", [Text("<tool_call>{1}"), *CALLED]),
    (HermesCalls, f"<tool_call>{CALL[:-9]}", [CallStart("f"), Arguments(ARGUMENTS[:-8])]),
    (HermesCalls, '<tool_call>{"na', [Text('<tool_call>{"na')]),
    (LlamaJsonCalls, "just {text}", [Text("just {text}")]),
    (LlamaJsonCalls, LLAMA, CALLED),
    (LlamaJsonCalls, f" <|python_tag|>{LLAMA}; {LATE}\n", [*CALLED, *LATE_CALLED]),
    (LlamaJsonCalls, '{"a": 1} is JSON', [Text('{"a": 1} is JSON')]),
    (LlamaJsonCalls, '{"a": 1', [Text('{"a": 1')]),
    (
        PythonicCalls,
        "[f(city='a)], \\'', n=[1, -2], ok=true), g.h()]",
        [
            CallStart("f"),
            Arguments('{"city": "a)], \'", "n": [1, -2], "ok": true}'),
            CallStart("g.h"),
            Arguments("{}"),
        ],
    ),
    (PythonicCalls, "[1, 2]", [Text("[1, 2]")]),
    (PythonicCalls, "[f(1)] no", [Text("[f(1)] no")]),
    (PythonicCalls, "[f(a=open('x'))]", [Text("[f(a=open('x'))]")]),
    (PythonicCalls, "[f(a=", [Text("[f(a=")]),
    (PythonicCalls, "<|python_start|>[f()]<|python_end|>", [CallStart("f"), Arguments("{}")]),
    (DeepSeekCalls, f"Hi {ALL}{V3}\n{V3}{ALL_END}", [Text("Hi"), *CALLED, *CALLED]),
    (DeepSeekCalls, f"{ALL}{V31}{ALL_END}", CALLED),
    (DeepSeekCalls, f"{OPEN}x{CLOSE}", [Text(f"{OPEN}x{CLOSE}")]),
    (DeepSeekCalls, f"a {ALL[:9]}", [Text(f"a {ALL[:9]}")]),
    (ForcedCalls, f"[{LLAMA}, {LLAMA}]", [*CALLED, *CALLED]),
    (lambda: ForcedCall("f"), ARGUMENTS, CALLED),
    (r1(), "I think</think>\n\nso ", [Reasoning("I think"), Text("so ")]),
    (r1(), "<think>\nI </th\n</think>so", [Reasoning("I </th"), Text("so")]),
    (r1(), "I think ", [Reasoning("I think ")]),
    (qwen(), "no thought", [Text("no thought")]),
    (qwen(), "<thin", [Text("<thin")]),
    (qwen(), f"<think>\nx\n</think>\n\n<tool_call>{CALL}</tool_call>", [Reasoning("x"), *CALLED]),
    (qwen(), "<think>\n\n</think>\n\nyes", [Text("yes")]),
]


def parsed(new: NewParser, parts: Iterator[str] | Sequence[str]) -> list[Piece]:
    parser = new()
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined(pieces + parser.finish())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("new", "text", "expected"), CASES)
def test_every_split_of_a_text_gives_the_same_pieces(
    new: NewParser, text: str, expected: list[Piece]
) -> None:
    assert parsed(new, [text]) == expected
    assert parsed(new, list(text)) == expected
    for first in range(len(text)):
        for second in range(first, len(text), 3):
            parts = [text[:first], text[first:second], text[second:]]
            assert parsed(new, parts) == expected, parts


WORDS = [
    *("{", "}", "[", "]", '"', "\\", ",", ";", " ", "\n", "(", ")", "'", "=", "x", ":"),
    *('"name": "f"', '"arguments": ', "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<function=f>", "<parameter=x>", "</parameter>", "</function>", "f", "{}", "1", '"true"'),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "call:f{", '<|"|>', "<|tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>"),
    *('<parameter name="x">', "<tool_call|>", "[TOOL_CALLS]", "[ARGS]", "f[ARGS]{"),
    *("<|tool_call_begin|>", "functions.f:0<|tool_call_argument_begin|>{", "<|tool_call_end|>"),
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="x" string="true">', "</｜DSML｜parameter>"),
    *(OPEN, CLOSE, ALL, ALL_END, SEP, "<|python_tag|>", "[f(a=1)", '{"name": "f", "parameters": {'),
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [None, "deepseek_r1", "qwen3"])
@pytest.mark.parametrize("tools", sorted(TOOLS))
@examples(100)
@given(text=TEXTS, data=st.data())
def test_any_text_is_read_the_same_whole_and_in_parts(
    name: str | None, tools: str, text: str, data: st.DataObject
) -> None:
    section: Section = "inside" if name == "deepseek_r1" else "undecided"
    new = with_reasoning(name, lambda: TOOLS[tools][0].new_parser(()), section)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    bounds = [0, *cuts, len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    assert parsed(new, parts) == parsed(new, [text]) == parsed(new, list(text))


def test_arguments_are_given_out_before_the_call_has_ended() -> None:
    parser = HermesCalls()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1') == [
        CallStart("f"),
        Arguments('{"a": 1'),
    ]


@pytest.mark.parametrize("text", ["[f(a=" + "(" * 5000 + ")" * 5000 + ")]", "[" * 9000])
def test_a_deeply_nested_text_is_no_call(text: str) -> None:
    assert parsed(PythonicCalls, [text]) == [Text(text)]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (HermesCalls, '<tool_call>{"name": "\\ud800", "arguments": {"a": 1}}</tool_call>'),
        (HermesCalls, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'),
        (PythonicCalls, "[f(a='\\ud800')]"),
    ],
)
def test_half_a_surrogate_pair_in_a_call_is_replaced(new: NewParser, text: str) -> None:
    (name, arguments) = parsed(new, [text])
    assert "?" in name.text + arguments.text
    json.dumps([name.text, json.loads(arguments.text)], ensure_ascii=False).encode()


def test_arguments_of_a_call_are_json() -> None:
    (_, arguments) = parsed(PythonicCalls, ["[f(a={'x': (1, None)})]"])
    assert arguments.kind == "arguments" and json.loads(arguments.text) == {"a": {"x": [1, None]}}
