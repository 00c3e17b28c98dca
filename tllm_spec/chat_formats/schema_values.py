"""Values of arguments that are written as plain text: their types come from the function's JSON
schema, in both directions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tllm_spec.chat_formats.chat_format import Part, Schema, either, json_part, text

NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# As templates in Jinja write Python's.
CONSTANTS = {"true": "true", "false": "false", "True": "true", "False": "false"}
NULLS = ("null", "None")
MAX_REFERENCES = 16
NO_SCHEMA: Schema = {}
ANY_JSON = frozenset({"JSON"})
JSON_TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip


def properties_of(schema: Schema, root: Schema) -> Mapping[str, tuple[Schema, bool]]:
    """The schemas of an object's members by name, and whether they are needed."""
    plain = resolved(schema, root)
    found, needed = plain.get("properties"), plain.get("required")
    names = [each for each in needed if isinstance(each, str)] if isinstance(needed, list) else []
    own = found if isinstance(found, Mapping) else {}
    is_needed = dict.fromkeys(own, False) | dict.fromkeys(names, True)
    return {name: (own.get(name, {}), needed) for name, needed in is_needed.items()}


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that a reference inside `root` is to; an empty one if it is to none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema or NO_SCHEMA
        schema = root
        for name in filter(None, reference.removeprefix("#").split("/")):
            key = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return NO_SCHEMA


def types_of(
    schema: Any, root: Schema, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """JSON types of the values; empty if the schema does not say. known: of schemas by their ids;
    references may lead to one many times, or in a circle."""
    plain, known = resolved(schema, root), {} if known is None else known
    if id(plain) not in known:
        known[id(plain)] = frozenset()
        known[id(plain)] = _types(plain, root, known)
    return known[id(plain)]


def _types(plain: Schema, root: Schema, known: dict[int, frozenset[str]]) -> frozenset[str]:
    kind = plain.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if values := _named_values(plain):
        return frozenset(JSON_TYPES[type(each)] for each in values if type(each) in JSON_TYPES)
    for name in ("anyOf", "oneOf", "allOf"):
        parts = plain.get(name)
        if isinstance(parts, list):
            found = [types_of(each, root, known) for each in parts]
            if all(found) or name == "allOf":
                return frozenset().union(*found)
    return frozenset({"object"} if "properties" in plain else {"array"} if "items" in plain else ())


def as_json(written: str, types: frozenset[str]) -> str:
    """The JSON of a value. A text that is of none of the types is a string."""
    plain = written.strip()
    if types == ANY_JSON and is_json(plain):
        return plain
    if plain in NULLS and ("null" in types or (types and "string" not in types)):
        return "null"
    if (types & {"integer", "number"} or not types) and NUMBER.fullmatch(plain):
        is_whole = "number" in types or not types or plain.lstrip("-").isdigit()
        if is_whole or float(plain).is_integer():
            return plain if is_whole else str(int(float(plain)))
    if "boolean" in types and plain in CONSTANTS:
        return CONSTANTS[plain]
    if not types and plain in ("true", "false", "null"):
        return plain
    kinds = {"[": "array", "{": "object"}
    if plain[:1] in kinds and (not types or kinds[plain[0]] in types) and is_json(plain):
        return plain
    return json.dumps(written, ensure_ascii=False)


def is_json(written: str) -> bool:
    """Whether it is JSON, which has no NaN."""
    try:
        json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)


def with_root(schema: Schema) -> Schema:
    """The schema with references to a copy of itself, which any part of it can have, too."""
    moved: Schema = _moved(schema) if '"$ref"' in json.dumps(schema) else schema
    return moved if moved is schema else {**moved, "$defs": {"of_function": moved}}


def _moved(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/of_function{reference[1:]}"
    return moved


def alone(schema: Schema, root: Schema) -> Schema:
    """A part of `root`, which is of `with_root`, as a schema by itself."""
    return {**schema, "$defs": root["$defs"]} if '"$ref"' in json.dumps(schema) else schema


def string_choices(schema: Schema, root: Schema) -> list[str] | None:
    """The strings that the schema allows; None if it does not name them."""
    values = _named_values(resolved(schema, root))
    return values if values and all(isinstance(each, str) for each in values) else None


def _named_values(schema: Schema) -> list[Any]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def typed_part(schema: Schema, root: Schema) -> Part | None:
    """The text of a value, if not any text is one: JSON, or one of the strings that the schema
    names. None for any text."""
    if (choices := string_choices(schema, root)) is not None:
        return either([text(each) or {"type": "regex", "pattern": "()"} for each in choices])
    types = types_of(schema, root)
    return json_part(alone(schema, root)) if types and "string" not in types else None
