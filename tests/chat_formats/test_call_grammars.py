"""Grammars of calls in each family's own format: they accept what the family's template writes,
with and without its line ends, and no value of a wrong type."""

import json
import random
import re
from functools import cache
from typing import Any

import pytest

from tests.agents.fuzz import FAMILIES, Family, pieces_of, random_answer
from tests.chat_formats.samples import ARGUMENTS, CALLS, FUNCTIONS, SAMPLES, Sample
from tests.chat_formats.test_families import IDS, rendered
from tests.grammar.walks import grammar_of_words, rows_of
from tllm_spec.chat_formats.chat_format import ChatFormat, Function, Part, num_chars
from tllm_spec.chat_formats.names import TOOLS, tools_format
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.guided_decoding import MAX_GRAMMAR_CHARS, GrammarSource

BYTES = [bytes([number]) for number in range(256)]


@cache
def grammar_of(tag: str, special: tuple[str, ...] = ()) -> CompiledGrammar:
    return grammar_of_words(GrammarSource("structural_tag", tag), BYTES, special=special)


def accepts(part: Part, text: str, special: tuple[str, ...] = ()) -> bool:
    """Whether the text is a whole one of the part, token by token."""
    grammar, ids = grammar_of(json.dumps({"format": part}), special), list[int]()
    while text:
        name = next((each for each in special if text.startswith(each)), None)
        ids += [257 + special.index(name)] if name else text[0].encode()
        text = text[len(name or text[0]) :]
    state = GrammarState(grammar)
    return state.better_drafts([*ids, 256], 0) == [*ids, 256]


def family(sample: Sample) -> ChatFormat:
    return (
        tools_format(sample.name, sample.template)
        if sample.name == "mistral"
        else TOOLS[sample.name][0]
    )


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_forced_calls_may_be_what_the_family_writes(sample: Sample) -> None:
    chosen = family(sample)
    part = chosen.calls_tag(FUNCTIONS, is_parallel=True)
    single = chosen.calls_tag(FUNCTIONS, is_parallel=False)
    for template in filter(None, (sample.template, sample.dense)):
        text = rendered(template).strip()
        assert accepts(part, text), text
        assert not accepts(single, text)
        assert accepts(single, rendered(template, CALLS[:1]).strip())
        assert accepts(single, rendered(template, CALLS[1:]).strip())


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_forced_calls_have_no_value_of_a_wrong_type(sample: Sample) -> None:
    part = family(sample).calls_tag(FUNCTIONS, is_parallel=True)
    wrong: list[dict[str, Any]] = [
        {"days": "many"}, {"days": 1.5}, {"unit": "K"}, {"rain": "no"}, {"of": {"a": 1}},
        {"of": [1]}, {"more": 1},
    ]  # fmt: skip
    for values in wrong:
        text = rendered(sample.template, [("get_weather", {**ARGUMENTS, **values})]).strip()
        assert not accepts(part, text), text
    for needed in ("city", "days"):
        left = {name: value for name, value in ARGUMENTS.items() if name != needed}
        assert not accepts(part, rendered(sample.template, [("get_weather", left)]).strip())
    assert not accepts(part, rendered(sample.template, [("other", {})]).strip())
    assert not accepts(part, "") and not accepts(part, "text")


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_free_answer_is_constrained_inside_calls_only(sample: Sample) -> None:
    chosen = family(sample)
    loose = [FUNCTIONS[0], Function("now", {"type": "object", "required": ["a"]})]
    part = chosen.answer_tag(loose, is_parallel=True)
    wrong = rendered(sample.template, [("get_weather", {**ARGUMENTS, "days": "x"})]).strip()
    assert accepts(part, "Just text.") and accepts(part, "")
    assert accepts(part, rendered(sample.template).strip())
    assert not accepts(part, wrong)
    if not chosen.lone_calls:
        text = f"Let me see.\n{rendered(sample.template).strip()}"
        assert accepts(part, text)
        assert not accepts(part, f"Let me see.\n{wrong}")


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_markers_may_be_special_tokens(sample: Sample) -> None:
    chosen = family(sample)
    special = tuple(sorted(chosen.markers, key=len, reverse=True))
    for part in (
        chosen.calls_tag(FUNCTIONS, is_parallel=True),
        chosen.answer_tag(FUNCTIONS, is_parallel=True),
    ):
        assert accepts(part, rendered(sample.template).strip(), special)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_tags_without_names_are_markers_where_they_are_tokens(sample: Sample) -> None:
    tags = set(re.findall(r"</?[a-z_:|]+>", rendered(sample.template)))
    assert tags - {"<b>"} <= set(family(sample).markers)  # that is in a value


@pytest.mark.thinned(2)
@pytest.mark.parametrize("written", FAMILIES, ids=[each.tools for each in FAMILIES])
def test_no_piece_of_an_answer_is_masked_however_it_is_cut(written: Family) -> None:
    rng = random.Random(0)
    chosen = tools_format(written.tools, written.template)
    for number in range(10):
        answer = random_answer(rng, written, number)
        offered = [each["function"] for each in answer.tools]
        functions = [
            Function(each["name"], each["parameters"], is_strict=each["strict"]) for each in offered
        ]
        pieces = [each.encode() for each in pieces_of(rng, answer.said, (), set())]
        parts = [chosen.answer_tag(functions, is_parallel=True)]
        if answer.calls and not answer.content:
            parts.append(chosen.calls_tag(functions, is_parallel=True))
        for part in parts:
            source = GrammarSource("structural_tag", json.dumps({"format": part}))
            grammar = grammar_of_words(source, [*BYTES, *pieces])
            ids = [256 + place for place in range(len(pieces) + 1)]
            rows = rows_of(GrammarState(grammar), [0, *ids[:-1]], range(-1, len(pieces)), ids[-1])
            for row, token, piece in zip(rows, ids, pieces, strict=False):
                assert token in row, (piece, answer.said)


HOSTILE: list[Any] = [
    {"properties": {"a": 5}}, {"properties": 5}, {"$ref": "#"}, {"$ref": "#/nowhere"},
    {"required": 5}, {"properties": {'"<': {}}}, {"type": "string"}, {"anyOf": [5, {}]},
    {"properties": {"a": {"$ref": "#/properties/a"}}}, {"properties": {"a": {"enum": [5, []]}}},
    {"properties": {f"p{number}": {"type": "string"} for number in range(60)}},
    {"properties": {"a": {"type": 5}, "b": True}}, {"properties": {"{": {}, "a}b": {"type": []}}},
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_a_hostile_schema_has_a_grammar_or_is_a_users_mistake(name: str) -> None:
    for schema in HOSTILE:
        function = Function("f", {"type": "object", **schema}, is_strict=True)
        for make in (TOOLS[name][0].calls_tag, TOOLS[name][0].answer_tag):
            try:
                tag = json.dumps({"format": make([function], is_parallel=True)})
                assert len(tag) < MAX_GRAMMAR_CHARS
                grammar_of(tag)
            except ValueError as error:
                assert str(error)


# Written out, the objects are 8 ** 20.
TREE = {f"d{depth}": {"properties": {f"k{i}": {"$ref": f"#/$defs/d{depth + 1}"} for i in range(8)}}
        for depth in range(20)}  # fmt: skip
UNIONS = {f"d{depth}": {"anyOf": [{"$ref": f"#/$defs/d{depth + 1}"}] * 10} for depth in range(40)}


@pytest.mark.parametrize("name", sorted(TOOLS))
@pytest.mark.parametrize("definitions", [TREE, UNIONS], ids=["tree", "unions"])
def test_references_to_a_schema_from_many_places_make_one_part(
    name: str, definitions: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    part = TOOLS[name][0].calls_tag([Function("f", schema)], is_parallel=True)
    if num_chars(part) < MAX_GRAMMAR_CHARS:
        assert num_chars(part) <= len(json.dumps(part))


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_many_references_share_one_copy_of_a_functions_schema(name: str) -> None:
    """A copy for each would take a minute of a small body."""
    properties = {f"p{i}": {"$ref": "#/$defs/n"} for i in range(100)}
    schema = {"properties": properties, "$defs": {"n": {"type": "integer"}}}
    part = TOOLS[name][0].calls_tag([Function("f", schema)], is_parallel=True)
    copies, left = set[int](), [part]
    while left:
        each = left.pop()
        own = each if isinstance(each, dict) else {}
        left += own.values() if own else each if isinstance(each, list) else ()
        copies |= {id(own["of_function"])} if "of_function" in own else set()
    assert len(copies) <= 1


REFERENCES = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/N"}, "self": {"$ref": "#"}},
    "required": ["n"],
    "$defs": {"N": {"type": ["integer", "null"]}},
}


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_references_of_a_schema_are_followed(sample: Sample) -> None:
    functions = [Function("f", REFERENCES)]
    part = family(sample).calls_tag(functions, is_parallel=True)
    for value, is_right in ((1, True), (None, True), ("x", False)):
        for arguments in ({"n": value}, {"n": 2, "self": {"n": value}}):
            text = rendered(sample.template, [("f", arguments)]).strip()
            assert accepts(part, text) == is_right, text


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_calls_may_follow_reasoning_with_and_without_white_space(sample: Sample) -> None:
    chosen = family(sample)
    begins = [each for each in (chosen.begin, chosen.call_begin) if each[1:]]
    for calls in (
        chosen.calls_tag(FUNCTIONS, is_parallel=True),
        chosen.answer_tag(FUNCTIONS, is_parallel=True),
    ):
        texts = {"begin": "<think>", "end": "</think>", "ends_at": begins}
        section = {"type": "reasoning", "section": "inside", **texts}
        part = {"type": "sequence", "elements": [section, calls]}
        for template in filter(None, (sample.template, sample.dense)):
            text = rendered(template).strip()
            assert accepts(part, f"hm{{m</think>{text}") and accepts(part, f"a</think>\n\n{text}")
            assert accepts(part, f"hmm {text}") == bool(begins)
            assert not accepts(part, "hmm")
