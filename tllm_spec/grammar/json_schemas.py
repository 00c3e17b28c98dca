"""JSON schemas of guided decoding. Keywords that the grammar's compiler would pass over are
refused, and a schema can become a part of another one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tllm_spec.config.option_checks import shown, shown_name

Schema = dict[str, Any]

# Keywords whose value is a schema or a list of schemas, and those that have schemas by name.
PARTS = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "items",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
NAMED_PARTS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
IGNORED = (
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "uniqueItems",
)
# Next to these the compiler reads no other constraint, but for `type`, which is harmless.
ALONE = ("$ref", "allOf", "anyOf", "oneOf")
CONSTRAINTS = frozenset(
    {
        *PARTS,
        *("const", "enum", "format", "pattern", "patternProperties", "properties", "required"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref"),
        *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    }
)
TAG_FORM = """a structural tag has a format, such as {"type": "structural_tag", "format": {"type": \
"triggered_tags", "triggers": [...], "tags": [{"begin": "...", "content": {"type": "json_schema", \
"json_schema": {...}}, "end": "..."}]}}; xgrammar's older form with structures is not served"""
SCHEMAS_OF_TAGS = ("json_schema", "schema")
# In a regular expression or EBNF: the compiler makes bytes of each half that are no UTF-8.
HALF_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")


def check_schema(schema: object) -> None:
    """Raises ValueError for a schema that a text might not match although its grammar is kept."""
    for part in parts_of(schema):
        if mistake := _mistake(part):
            raise ValueError(f"{mistake} is not supported in the JSON schema")


def check_tag(tag: object) -> None:
    """The same for the schemas in a structural tag of xgrammar, and for one without a format."""
    for schema in schemas_of_tag(tag):
        check_schema(schema)
    if not isinstance(tag, dict) or "format" not in tag:
        raise ValueError(TAG_FORM)


def schemas_of_tag(tag: object) -> Iterator[object]:
    """The JSON schemas in a structural tag."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield from (value for name, value in part.items() if name in SCHEMAS_OF_TAGS)
            waiting += (value for name, value in part.items() if name not in SCHEMAS_OF_TAGS)


def moved(schema: Schema, there: str) -> Schema:
    """A copy for another schema: references to its root (`#`) are to `there`. Raises ValueError for
    one that is nested too deeply."""
    try:
        copy: Schema = json.loads(json.dumps(schema))
    except RecursionError as error:
        raise ValueError("the JSON schema is nested too deeply") from error
    for part in parts_of(copy):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = there + reference[1:]
    return copy


def parts_of(schema: object) -> Iterator[Schema]:
    """The schema, if it is an object, and all in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            waiting += [value for name, value in part.items() if name in PARTS]
            for name in NAMED_PARTS & part.keys():
                if isinstance(part[name], dict):
                    waiting += part[name].values()


def _mistake(part: Schema) -> str | None:
    for name in IGNORED:
        if name in part and part[name] is not False:
            return name
    for name in ALONE:
        if part.get(name) == []:
            return f"{name} = []"
        if name in part and (others := sorted(CONSTRAINTS & part.keys() - {name})):
            return f"{others[0]} next to {name}"
    if len(part.get("allOf") or ()) > 1:
        return "allOf with several schemas"
    reference = part.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        return f"$ref = {shown(reference)}, which does not begin with #/,"
    if isinstance(reference, str) and ("~" in reference or "%" in reference):
        return f"an escape in $ref = {shown(reference)}"
    if isinstance(part.get("pattern"), str) and HALF_ESCAPE.search(part["pattern"]):
        return f"half of a surrogate pair in pattern = {shown(part['pattern'])}"
    return _undeclared(part)


def _undeclared(part: Schema) -> str | None:
    required, properties = part.get("required"), part.get("properties") or {}
    if not isinstance(required, list) or not isinstance(properties, dict):
        return None  # the compiler says what is wrong
    for name in required:
        if isinstance(name, str) and name not in properties:
            return f"required = [{shown(shown_name(name))}] without such a property"
    return None
