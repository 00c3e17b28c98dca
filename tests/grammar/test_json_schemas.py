"""Which JSON schemas are refused because a text would not have to match them, and schemas that
become parts of others."""

import json
from typing import Any

import pytest

from tllm_spec.grammar.guided_decoding import GuidedDecodingParams
from tllm_spec.grammar.json_schemas import check_schema, moved

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
POINT = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
# By what is refused, such a schema and a text that does not match it, but the grammar.
REFUSED: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": True}, "[1, 1]"),
    "not": ({**NUMBER, "not": {"const": 1}}, "1"),
    "if": ({**POINT, "if": {}, "then": {"required": ["y"]}}, '{"x": 1}'),
    "dependentRequired": ({**POINT, "dependentRequired": {"x": ["y"]}}, '{"x": 1}'),
    "allOf with several schemas": ({"allOf": [NUMBER, {"minimum": 3}]}, "1"),
    "required next to anyOf": ({"anyOf": [{"type": "object"}], "required": ["a"]}, "{}"),
    r"minimum next to \$ref": ({"$ref": "#/$defs/A", "minimum": 5, "$defs": {"A": NUMBER}}, "1"),
    r"\$ref = '#a', which does not": (
        {"$ref": "#a", "$defs": {"A": {"$anchor": "a", **TEXT}}},
        "1",
    ),
    r"\$ref = 'http://x/y', which does not": ({"$ref": "http://x/y"}, "1"),
    r"required = \['y'\] without": ({**POINT, "required": ["y"]}, '{"x": 1}'),
    r"anyOf = \[\]": ({"anyOf": []}, ""),
}


@pytest.fixture(scope="module")
def compiler() -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [chr(32 + i) for i in range(95)] + ["</s>"]
    tokenizer = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[95])
    return xgrammar.GrammarCompiler(tokenizer, max_threads=1)


@pytest.mark.parametrize("what", REFUSED)
def test_a_keyword_that_the_compiler_passes_over_is_refused_wherever_it_is(
    what: str, compiler: Any
) -> None:
    schema, text = REFUSED[what]
    for whole in (schema, {"properties": {"p": {"items": {"anyOf": [TEXT, schema]}}}}):
        with pytest.raises(ValueError, match=f"guided_decoding.json: {what}.* is not supported"):
            GuidedDecodingParams(json=whole)
    xgrammar = pytest.importorskip("xgrammar")
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    assert not text or matcher.accept_string(text)
    assert matcher.is_completed(), "the compiler knows the keyword now: do not refuse it"


def test_an_escape_in_a_reference_is_named_as_the_mistake() -> None:
    for reference in ("#/$defs/a~1b", "#/$defs/a%20b"):
        with pytest.raises(ValueError, match=r"an escape in \$ref = .* is not supported"):
            GuidedDecodingParams(json={"$ref": reference, "$defs": {"a/b": TEXT, "a b": TEXT}})


@pytest.mark.parametrize(
    "tag",
    [
        {"format": {"type": "json_schema", "json_schema": {"items": {"not": {}}}}},
        {"structures": [{"begin": "<", "schema": {"not": {}}, "end": ">"}], "triggers": ["<"]},
        {"format": {"elements": [{"content": {"type": "json_schema", "json_schema": {"not": 1}}}]}},
    ],
)
def test_the_schemas_of_a_structural_tag_are_checked_too(tag: Any) -> None:
    with pytest.raises(ValueError, match="structural_tag: not is not supported"):
        GuidedDecodingParams(structural_tag={"type": "structural_tag", **tag})


@pytest.mark.parametrize(
    "schema",
    [
        {**TEXT, "uniqueItems": False},
        {**TEXT, "format": "uri", "minLength": 1, "maxLength": 2083},
        {"const": {"not": 1, "$ref": "x"}},
        {"type": "object", "properties": {"not": TEXT, "if": TEXT}, "required": ["not"]},
        {"type": "object", "title": "A", "$ref": "#/$defs/A", "description": "b", "$defs": {}},
        {"type": "array", "items": NUMBER, "$defs": 5, "properties": [1]},
        {"oneOf": [TEXT, NUMBER], "discriminator": {"propertyName": "a"}, "default": None},
        {"required": 3},
        True,
    ],
)
def test_other_schemas_are_left_to_the_compiler(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": r"\ud83d\ude00"},
        {"grammar": r'root ::= "\\\uD83D"'},
        {"json": {**TEXT, "pattern": r"^\ud83d$"}},
    ],
)
def test_the_escape_of_half_a_character_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        GuidedDecodingParams(**options)
    assert GuidedDecodingParams(regex=r"\\ud83d\u00e9")


def test_a_choice_may_have_any_character(compiler: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    for text in ("😀", "é", '"\\', "\n", "\u2028"):
        grammar = compiler.compile_grammar(GuidedDecodingParams(choice=[text]).source.text)
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string(text) and matcher.is_completed()


def test_references_of_a_moved_schema_follow_it() -> None:
    schema = {
        "properties": {"child": {"$ref": "#"}, "n": {"anyOf": [{"$ref": "#/$defs/N"}]}},
        "$defs": {"N": NUMBER},
        "const": {"$ref": "#"},
    }
    copy = moved(schema, "#/$defs/f")
    assert copy["properties"]["child"] == {"$ref": "#/$defs/f"}
    assert copy["properties"]["n"] == {"anyOf": [{"$ref": "#/$defs/f/$defs/N"}]}
    assert copy["const"] == {"$ref": "#"} and schema["properties"]["child"] == {"$ref": "#"}
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        moved(deep, "#/x")
    while deep:  # or Python recurses to free it
        deep = deep["items"]
