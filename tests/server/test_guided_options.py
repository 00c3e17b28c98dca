"""`response_format` and vLLM's names become the same grammars."""

from typing import Any

import pytest

from tllm_spec.server.protocol import guided_params

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"guided_json": SCHEMA}, "json_schema", '"a"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            '"a"',
        ),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, "json_schema", '"a"'),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": TAG}, "structural_tag", "any_text"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+"),
        ({"response_format": {"type": "ebnf", "ebnf": 'root ::= "a"'}}, "grammar", '"a"'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", '"a"'),
        ({"guided_choice": ["x", "y"]}, "choice", '["x", "y"]'),
        ({"structured_outputs": {"choice": ["x"]}}, "choice", '["x"]'),
    ],
)
def test_each_option_becomes_a_grammar(options: dict[str, Any], kind: str, text: str) -> None:
    params = guided_params(options)
    assert params is not None and params.source.kind == kind and text in params.source.text


def test_text_and_null_are_no_grammar() -> None:
    assert guided_params({"response_format": {"type": "text"}, "guided_json": None}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema needs an object with a schema"),
        ({"response_format": {}}, "the types text, json_object"),
        ({"response_format": {"type": ["text"]}}, "the types text, json_object"),
        ({"response_format": {"type": {}}}, "the types text, json_object"),
        ({"tool_choice": {"a": "b" * 70000}}, r"tools = \[...\]: guided_decoding.json has 70009"),
        ({"guided_choice": []}, "guided_choice = .*a list of non-empty strings"),
        ({"structured_outputs": {}}, "structured_outputs = .*exactly one of"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guided_params(options)
