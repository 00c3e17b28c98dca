"""Schemas and structural tags that are served."""

import json
import random
from typing import Any

import pytest

from tests.grammar.walks import accepts, compiled, random_text

TEXT, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
NAME_A = {"type": "object", "properties": {"kind": {"const": "a"}}, "additionalProperties": False}
NAME_B = {"type": "object", "properties": {"kind": {"const": "b"}}, "additionalProperties": False}
UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"

# By name: a schema, texts that match it and texts that do not.
SERVED: dict[str, tuple[Any, list[str], list[str]]] = {
    "format and pattern": (
        {**TEXT, "format": "uuid", "pattern": UUID},
        ['"00000000-0000-1000-8000-000000000000"'],
        ['"00000000-0000-0000-0000-000000000000"'],
    ),
    "lengths and pattern": (
        {**TEXT, "pattern": "^(a|bc)+$", "minLength": 2, "maxLength": 3},
        ['"aa"', '"abc"'],
        ['"a"', '"bcbc"'],
    ),
    "lengths": ({**TEXT, "minLength": 1, "maxLength": 2}, [r'"\n😀"'], ['""', '"\t"', '"abc"']),
    "format and lengths": (
        {**TEXT, "format": "uri", "minLength": 1, "maxLength": 2083},
        ['"https://a.b/c?d=e#f"'],
        ['"no uri"', f'"a:{"b" * 2083}"'],
    ),
    "a date": ({**TEXT, "format": "date"}, ['"2024-02-29"'], ['"2023-04-31"']),
    "a time": ({**TEXT, "format": "time"}, ['"14:48:56.5Z"'], ['"14:48:5688"']),
    "an IPv4 address": ({**TEXT, "format": "ipv4"}, ['"10.66.77.39"'], ['"010.66.77.39"']),
    "a format without a type": ({"format": "date"}, ['"2024-01-01"', "1"], ['"a"']),
    "a pattern or null": ({"type": ["string", "null"], "pattern": "^a$"}, ['"a"', "null"], ['"b"']),
    "a bound without a type": ({"minimum": 3}, ["3", "4.5"], ["2"]),
    "bounds of whole numbers": ({**NUMBER, "minimum": 1.5, "exclusiveMaximum": 4.5}, ["2"], ["1"]),
    "two lower bounds": ({**NUMBER, "minimum": 3, "exclusiveMinimum": 3}, ["4"], ["3"]),
    "multiples in a range": (
        {**NUMBER, "multipleOf": 5, "minimum": 1, "maximum": 59},
        ["5", "55"],
        ["0", "7", "60"],
    ),
    "an array without items": (
        {"type": "array", "maxItems": 2},
        ["[]", '[1, {"a": null}]'],
        ["[1, 2, 3]"],
    ),
    "at least two": ({"type": "array", "minItems": 2}, ["[1, null]"], ["[1]"]),
    "a tuple": ({"type": "array", "prefixItems": [NUMBER, NULL]}, ["[1, null]"], ["[null, 1]"]),
    "a tuple of draft 7": (
        {"type": "array", "items": [NUMBER, NULL], "additionalItems": {"type": "boolean"}},
        ["[1, null]", "[1, null, true]"],
        ["[null]", "[1, null, 2]"],
    ),
    "a tuple and more": (
        {"type": "array", "prefixItems": [NULL], "minItems": 2},
        ["[null, 1]"],
        ["[null]", "[1, 1]"],
    ),
    "a type next to enum": ({"enum": ["3", 4, 5.0, 6.5, True], **NUMBER}, ["4"], ['"3"', "6.5"]),
    "a type next to const": ({"const": 3, "type": ["number", "null"]}, ["3"], ["null"]),
    "a pattern next to enum": ({"enum": ["ab", "b"], "pattern": "^a"}, ['"ab"'], ['"b"']),
    "a type next to anyOf": (
        {"type": ["integer", "null"], "anyOf": [{"minimum": 3}, TEXT, True]},
        ["5", "null"],
        ['"a"', "5.5"],
    ),
    "oneOf by types": ({"oneOf": [NUMBER, TEXT]}, ["1", '"a"'], ["null"]),
    "names by a pattern": (
        {"type": "object", "patternProperties": {r'^"\d?$': NULL}, "additionalProperties": False},
        [r'{"\"": null, "\"7": null}', "{}"],
        ['{"a": null}', r'{"\"": 1}'],
    ),
    "a number of properties": ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    "all of several": ({"allOf": [NUMBER, {"minimum": 3}]}, ["4"], ["2", '"a"']),
    "a bound next to a reference": (
        {"$ref": "#/$defs/A", "minimum": 5, "$defs": {"A": NUMBER}},
        ["5"],
        ["4"],
    ),
    "an anchor": ({"$ref": "#a", "$defs": {"A": {"$anchor": "a", **TEXT}}}, ['"a"'], ["1"]),
    "a name that is only required": ({"type": "object", "required": ["y"]}, ['{"y": 1}'], ["{}"]),
    "tenths": ({"type": "number", "multipleOf": 0.1}, ["0.3", "2"], ["0.35"]),
    "a multiple without bounds": ({"type": "number", "multipleOf": 0.5}, ["1.5"], ["1.2"]),
    "elements that may be equal": (
        {"type": "array", "uniqueItems": False, "default": {"uniqueItems": False}},
        ["[1, 1]"],
        ["{}"],
    ),
    "a name like a keyword": (
        {"properties": {"uniqueItems": False, "pattern": TEXT}, "required": ["pattern"]},
        ['{"pattern": "a"}'],
        ['{"pattern": 1}'],
    ),
    "white space": ({"type": "array", "minItems": 1}, [f"[{' ' * 32}1]"], [f"[{' ' * 33}1]"]),
    "names that it does not know": ({**NUMBER, "nullable": True, "x-order": 3}, ["1"], ["null"]),
}
REFUSED: dict[str, Any] = {
    r"Unimplemented keys: \[\"not\"\]": {**NUMBER, "not": {"const": 1}},
    r"Unimplemented keys: \[\"if\", \"then\"\]": {"if": {}, "then": {"required": ["y"]}},
    r"Unimplemented keys: \[\"uniqueItems\"\]": {"type": "array", "uniqueItems": True},
    r"Unimplemented keys: \[\"contains\"\]": {"contains": NUMBER},
    r"Unimplemented keys: \[\"propertyNames\"\]": {"propertyNames": {"pattern": "^a"}},
    r"Unimplemented keys: \[\"dependentRequired\"\]": {"dependentRequired": {"x": ["y"]}},
    "oneOf constraints are not supported$": {"oneOf": [{}, {}]},
    "'http://x/y' is not present": {"$ref": "http://x/y"},
    "format: idn-email": {**TEXT, "format": "idn-email"},
    "anyOf is empty": {"anyOf": []},
    "type: objekt": {"type": "objekt"},
    "Expected positive integer for 'maxLength'": {**TEXT, "maxLength": -1},
    "minLength.*greater than maxLength": {**TEXT, "minLength": 3, "maxLength": 2},
    "minimum.*greater than maximum": {**NUMBER, "minimum": 5, "maximum": 4},
    "are not disjoint": {"patternProperties": {"^a": NULL, "b$": NUMBER}},
}


@pytest.mark.parametrize("what", SERVED)
def test_a_schema_has_its_texts_and_no_others(what: str) -> None:
    schema, texts, others = SERVED[what]
    inside = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    definitions = schema.pop("$defs", {})
    grammars = (
        compiled({**schema, "$defs": definitions}),
        compiled({**inside, "$defs": definitions}),
    )
    for text in texts + others:
        for grammar, whole in zip(grammars, (text, f'{{"p": {text}}}'), strict=True):
            assert accepts(grammar, whole) == (text in texts), whole


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_kept_is_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiled(REFUSED[reason])


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """With keywords that stand next to each other by chance."""
    made: dict[str, Any] = {}
    if rng.random() < 0.85:
        kinds = ["string", "integer", "number", "array", "object", "null", "boolean"]
        made["type"] = rng.choice([rng.choice(kinds), rng.sample(kinds, 2)])
    small = rng.randint(0, 3)
    options: dict[str, Any] = {
        "pattern": rng.choice([r"^a+$", "b", r'^["\\]{1,3}$', r"^(?!a)\w+$", r"^[^a](x|yz)?$"]),
        "format": rng.choice(["date", "time", "ipv4", "date-time", "email"]),
        "minLength": small,
        "maxLength": small + rng.randint(0, 3),
        "minimum": small - 1.5,
        "exclusiveMaximum": small + 10,
        "multipleOf": small + 1,
        "minItems": small,
        "maxItems": small + rng.randint(0, 2),
        "enum": rng.sample(["a", 'b"', 1, 2.5, None, True, [], {"a": 1}], 3),
        "minProperties": rng.randint(0, 1),
        "maxProperties": rng.randint(1, 2),
        "additionalProperties": rng.choice([True, False, TEXT]),
        "propertyNames": {"pattern": "^[a-c]{1,2}$"},
        "patternProperties": {"^x": NUMBER, '^"y': NULL},
    }
    if depth:
        options |= {
            "items": random_schema(rng, depth - 1),
            "prefixItems": [random_schema(rng, 0), random_schema(rng, 0)],
            "required": ["a"],
            "const": rng.choice(["a", 2, [1], {"a": None}]),
            "allOf": [random_schema(rng, depth - 1)],
            "$ref": rng.choice(["#/$defs/d", "#/properties/a"]),
            "$defs": {"d": random_schema(rng, 0)},
            "properties": {"a": random_schema(rng, depth - 1), 'b"': random_schema(rng, 0)},
            "anyOf": [random_schema(rng, 0), random_schema(rng, depth - 1)],
            "oneOf": [random_schema(rng, 0), random_schema(rng, 0)],
        }
    for name in rng.sample(sorted(options), rng.choice([0, 1, 1, 2, 3])):
        made[name] = options[name]
    return made


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 340), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_all_texts_of_random_schemas_are_valid(seeds: range) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator
    num_texts = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            schema.setdefault("$defs", {}).setdefault("d", TEXT)
            grammar = compiled(schema)
        except ValueError:
            continue
        valid = validator(schema, format_checker=validator.FORMAT_CHECKER)
        for text in filter(None, (random_text(grammar, rng) for _ in range(6))):
            num_texts += 1
            assert valid.is_valid(json.loads(text)), (seed, schema, text)
    assert num_texts > 2 * len(seeds)


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
        ({"type": "sequence", "elements": [ANY, JSON]}, "any_text is served before a literal"),
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
