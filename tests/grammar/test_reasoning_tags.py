"""Structural tags whose literals are tokens, and sections of reasoning. A text is written with
characters as tokens, and with the names of the special tokens `[1]` to `[5]`."""

import re
from typing import Any

import pytest

from tests.grammar.walks import CHARACTERS, END, NUMBERS, grammar_of_words, rows_of
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams

SPECIAL = [f"[{number}]" for number in range(1, 6)]
IDS = {name: END + number for number, name in enumerate(SPECIAL, start=1)}
SIZE = END + 1 + len(SPECIAL)


def grammar(*elements: Any) -> CompiledGrammar:
    form = {"type": "sequence", "elements": list(elements)}
    tag = {"type": "structural_tag", "format": form}
    words = [each.encode() for each in CHARACTERS]
    return grammar_of_words(GuidedDecodingParams(structural_tag=tag).source, words, special=SPECIAL)


def ids_of(text: str) -> list[int]:
    found = re.findall(r"\[\d\]|.", text, flags=re.DOTALL)
    return [IDS[each] if each in IDS else NUMBERS[each] for each in found]


def accepts(made: CompiledGrammar, text: str) -> bool:
    """Whether it is a whole text, by the masks of its tokens, one after the other."""
    state, ids = GrammarState(made), [*ids_of(text), END]
    rows = rows_of(state, [0, *ids], range(-1, len(ids)), SIZE)
    return all(token in row for token, row in zip(ids, rows[:-1], strict=True))


def allowed_after(made: CompiledGrammar, text: str) -> set[int]:
    state = GrammarState(made)
    state.read(ids_of(text), 0)
    return set(rows_of(state, [0], [-1], SIZE)[0])


ALL = set(range(SIZE))
JSON = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    },
}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def thoughts(section: str = "inside", end: str = "[2]", **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "begin": "[1]", "end": end, "section": section, **more}


CALL = tag("[3]f ", JSON, "[4]")
ENDS = {"ends_at": ["[3]"]}
OPTIONAL, PLUS, STAR = (
    {"type": kind, "content": const("ab")} for kind in ("optional", "plus", "star")
)
CALLS = {"type": "triggered_tags", "triggers": ["[3]"], "tags": [CALL]}
LIST = {"type": "tags_with_separator", "separator": "\n", "tags": [CALL], "at_least_one": True}

# By what: parts, texts that match them and texts that do not.
PARTS: dict[str, tuple[list[Any], list[str], list[str]]] = {
    "white space": (
        [const("a"), {"type": "whitespace"}, const("b")],
        ["ab", "a b", "a\n\nb", f"a{' ' * 32}b"],
        [f"a{' ' * 33}b", "a\u00a0b"],
    ),
    "optional": ([OPTIONAL, const("c")], ["c", "abc"], ["ababc"]),
    "plus": ([PLUS, const("c")], ["abc", "ababc"], ["c"]),
    "star": ([STAR, const("c")], ["c", "ababc"], ["ac"]),
    "tokens in literals": ([const("a[3]b[4]")], ["a[3]b[4]"], ["a[3]b", "ab"]),
    "text to a constant": ([TEXT, const("xy")], ["xy", "axxy", "[1]xy", "a[3]axy"], ["axyb", "a"]),
    "text to a token": ([TEXT, const("[3]b")], ["[3]b", "a[1]é[3]b"], ["[3]a", "a[3]b[3]b"]),
    "text to text and a token": (
        [TEXT, const("<[3]b")],
        ["<[3]b", "a<<[3]b", "a < b[1]<[3]b"],
        ["a[3]b", "a<[1][3]b"],
    ),
    "text to one of two": (
        [TEXT, {"type": "or", "elements": [const("[3]b"), tag("x", const("y"), "z")]}],
        ["a[3]b", "axyz"],
        ["axb[3]b", "a[3]xyz"],
    ),
    "text to several": ([TEXT, {"type": "plus", "content": CALL}], ['a[3]f {"a":1}[4]'], ["a"]),
    "text without": (
        [{**TEXT, "excludes": ["no", "[1]"]}, const("[3]")],
        ["a[3]", "n[2]o[3]"],
        ["no[3]", "[1][3]"],
    ),
    "text without, to the end": ([{**TEXT, "excludes": ["no"]}], ["", "n[2]o"], ["ano"]),
    "reasoning": (
        [thoughts(), JSON],
        ['[2]{"a":1}', 'hm[1]"{[3]é\n[2]\n\n{"a":1}', 'a[2] {"a": 2}'],
        ['{"a":1}', 'a[2]b{"a":1}', "a", "a[2]", '[2][2]{"a":1}'],
    ),
    "reasoning to text": (
        [thoughts(end="</t>"), JSON],
        ['</t>{"a":1}', 'a</[3]t></t>\n\n{"a":1}', 'a[1]b</</t> {"a":1}'],
        ['a[2]{"a":1}', 'a</t>b</t>{"a":1}'],
    ),
    "maybe reasoning": (
        [thoughts("undecided"), JSON],
        ['{"a":1}', ' \n{"a":1}', '[1]a[2]{"a":1}', '\n[1][2] {"a":1}'],
        ['a[2]{"a":1}', '[1]{"a":1}', '[1]a[2][1]b[2]{"a":1}'],
    ),
    "reasoning to a call": (
        [thoughts(**ENDS), CALL],
        ['a[3]f {"a":1}[4]', 'a[2]\n[3]f {"a":1}[4]'],
        ['a[3]g {"a":1}[4]', 'a[3]f {"a":1}[4][2]'],
    ),
    "reasoning to calls": (
        [thoughts("undecided", **ENDS), {"type": "whitespace"}, LIST],
        [
            '[3]f {"a":1}[4]\n[3]f {"a":1}[4]',
            '\n[1]a[3]f {"a":1}[4]\n[3]f {"a":1}[4]',
            '[1]a[2]\n\n[3]f {"a":1}[4]',
        ],
        ['[1]a[2]\n\n[3]f {"a":1}[4]a', "[1]a[2]"],
    ),
    "reasoning and maybe calls": (
        [thoughts(**ENDS), CALLS],
        [
            "a[2]",
            'a[3]f {"a":1}[4]',
            'a[2]b[1][3]f {"a":1}[4]c',
            'a[3]f {"a":1}[4]b[3]f {"a":1}[4]',
        ],
        ["a", "a[3]g", "a[2]b[3]g", 'a[3]f {"a":1}[4]b[3]g'],
    ),
    "maybe reasoning and maybe calls": (
        [thoughts("undecided"), CALLS],
        ["", "a", "[1]a[2]b", '\na[3]f {"a":1}[4]', '[1]b[3]c[2] a[3]f {"a":1}[4]'],
        ["[3]g", "[1]b[3]c[2] a[3]g"],
    ),
    "reasoning to a call that cannot follow": (
        [thoughts(**ENDS), JSON],
        ['a[3]b[2]{"a":1}'],
        ['a[3]{"a":1}'],
    ),
}


@pytest.mark.parametrize("what", PARTS)
def test_parts_have_their_texts_and_no_others(what: str) -> None:
    elements, texts, others = PARTS[what]
    made = grammar(*elements)
    assert [text for text in texts if not accepts(made, text)] == []
    assert [text for text in others if accepts(made, text)] == []


def test_inside_reasoning_every_token_is_allowed_that_ends_no_text() -> None:
    made = grammar(thoughts(), JSON)
    for text in ("", "a", "é{", "[1][3]", "a[5]"):
        assert allowed_after(made, text) == ALL - {END}, text
    assert allowed_after(made, "a[2]") == set(ids_of("{ \n\r\t"))


def test_after_a_marker_in_reasoning_its_call_is_forced() -> None:
    assert allowed_after(grammar(thoughts(**ENDS), CALL), "a[3]") == set(ids_of("f"))
    assert allowed_after(grammar(thoughts(**ENDS), JSON), "a[3]") == ALL - {END}


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (thoughts("over"), "section = 'over': inside and undecided are accepted"),
        (thoughts(ends_at="[3]"), r"ends_at = '\[3\]': a list of texts is needed"),
        ({"type": "reasoning", "section": "inside"}, "begin = None: a text is needed"),
        ({"type": "star"}, "content is missing in a part of type star"),
    ],
)
def test_a_section_that_is_not_served_is_refused_with_the_reason(part: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"guided_decoding = structural_tag: {reason}"):
        grammar(part, JSON)
