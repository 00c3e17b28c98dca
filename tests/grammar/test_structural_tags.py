"""Texts of each form of a structural tag."""

from typing import Any

import pytest

from tests.grammar.walks import accepts, compiled

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
ANY, CALL = {"type": "any_text"}, '<f=a>{"a":1}</f>'
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {"begin": "<f=a>", "content": JSON, "end": "</f>"},
        {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"},
    ],
}
ITEMS = {
    "type": "tags_with_separator",
    "separator": ",",
    "tags": [
        {"begin": "<a>", "content": JSON, "end": "</a>"},
        {"begin": "<b>", "content": {"type": "const_string", "value": "q"}, "end": "</b>"},
    ],
}
EBNF = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}


def tag(content: Any, begin: str = "<f>", end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# By form: the format, texts that match it and texts that do not.
FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "any text": (ANY, ["", "a\nb", "<f>"], []),
    "a constant": ({"type": "const_string", "value": 'a"'}, ['a"'], ["a"]),
    "JSON": (JSON, ['{"a":1}', '{"a": 1}'], ["{}"]),
    "a tag": (tag(JSON), ['<f>{"a":1}</f>'], ["<f>{}</f>", '{"a":1}', '<f> {"a":1}</f>']),
    "ends": (tag({"type": "regex", "pattern": "[a/]+"}, "<", [">", "!"]), ["<a>", "</!"], ["<a"]),
    "any text in a tag": (tag(ANY, "", ["</t>", "!"]), ["a</t>", "a<!"], ["a", "a!b", "a</t>b!"]),
    "thoughts": (
        {"type": "sequence", "elements": [tag(ANY, "<t>", "</t>"), JSON]},
        ['<t>x < y\n</t>{"a":1}', '<t></t>{"a":1}'],
        ['{"a":1}', '<t>a</t>b</t>{"a":1}'],
    ),
    "EBNF": (tag(EBNF), ["<f>((x))</f>"], ["<f>(x</f>"]),
    "one of": ({"type": "or", "elements": [EBNF, JSON]}, ["(x)", '{"a":2}'], ["z"]),
    "calls in text": (
        CALLS,
        ["", "hello", "a<f", f"hi {CALL} then <f=b>12</f>", f"{CALL}{CALL}"],
        ["hi <f=c>", "hi <f=a>x", "<f="],
    ),
    "a call and text": (CALLS | {"at_least_one": True}, [f"{CALL} x {CALL}"], ["x", f"x{CALL}"]),
    "text or a call": (CALLS | {"stop_after_first": True}, ["x", f"x {CALL}"], [f"{CALL} x"]),
    "one call": (CALLS | {"stop_after_first": True, "at_least_one": True}, [CALL], [f"x{CALL}"]),
    "thoughts in text": (
        {**CALLS, "triggers": ["<t>"], "tags": [tag(ANY, "<t>", "</t>")]},
        ["a<t>b</t>c"],
        ["a<t>b", "a<t>b</t>c<t>"],
    ),
    "a list": (ITEMS, ["", '<a>{"a":1}</a>,<b>q</b>'], ["<b>q</b>,"]),
    "a list of one": (ITEMS | {"stop_after_first": True}, ["", "<b>q</b>"], ["<b>q</b>,<b>q</b>"]),
    "a longer list": (ITEMS | {"at_least_one": True}, ["<b>q</b>"], [""]),
    "white space": (tag(JSON), [f'<f>{{{" " * 32}"a":1}}</f>'], [f'<f>{{{" " * 33}"a":1}}</f>']),
}


def of_format(form: Any) -> Any:
    return compiled({"type": "structural_tag", "format": form}, "structural_tag")


@pytest.mark.parametrize("what", FORMS)
def test_a_form_has_its_texts_and_no_others(what: str) -> None:
    form, texts, others = FORMS[what]
    grammar = of_format(form)
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "tagged"}, "a part with type = 'tagged': any_text, const_string"),
        ({"type": "token", "token": 3}, "a part with type = 'token'"),
        ({"type": "sequence", "elements": [CALLS, JSON]}, "at the end of the text only"),
        ({"type": "sequence", "elements": [ANY, JSON]}, "any_text is served where a tag ends it"),
        ({"type": "sequence", "elements": []}, r"elements = \[\]: a list is needed"),
        (CALLS | {"triggers": ["<g"]}, "begin = '<f=a>' needs one of the triggers"),
        (CALLS | {"excludes": ["a"]}, r"excludes = \['a'\] in a structural tag is not served"),
        (JSON | {"style": "qwen_xml"}, "style = 'qwen_xml' in a structural tag is not served"),
        (tag(JSON, end=3), "end = 3: a text or a list of texts"),
        (tag({"type": "json_schema"}), "json_schema is missing in a part of type json_schema"),
        (tag({**JSON, "json_schema": {"not": {}}}), r"Unimplemented keys: \[\"not\"\]"),
        (tag({**JSON, "json_schema": {"x-guidance": {}}}), "x-guidance in a JSON schema is refus"),
    ],
)
def test_a_form_that_is_not_served_is_refused_with_the_reason(form: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"guided_decoding = structural_tag: .*{reason}"):
        of_format(form)


@pytest.mark.parametrize("value", [[], {"structures": [], "triggers": ["<"]}])
def test_a_tag_without_a_format_is_refused_with_an_example(value: Any) -> None:
    with pytest.raises(ValueError, match="a structural tag has a format, such as "):
        compiled(value, "structural_tag")
