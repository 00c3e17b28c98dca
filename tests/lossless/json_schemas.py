"""Random JSON schemas, and whether a value matches one, without a library for either."""

from random import Random
from typing import Any


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """Every value that matches is short, so that a small model ends it."""
    kinds = ["integer", "boolean", "null", "string", "enum"]
    kind = random.choice(kinds if depth > 1 else [*kinds, "object", "array", "object"])
    if kind == "object" or depth == 0:
        names = random.sample(["name", "size", "ok", "x", "path", "count"], random.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(random, depth + 1) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    if kind == "array":
        items = random_schema(random, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    if kind == "enum":
        return {"enum": random.sample(["red", "green", "blue", "grey"], 2)}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": random.choice((9, 400))}
    return {"type": kind} | ({"maxLength": 6} if kind == "string" else {})


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Knows what `random_schema` makes."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        own = schema["properties"]
        return (
            isinstance(value, dict)
            and value.keys() == own.keys()
            and all(matches(value[name], own[name]) for name in own)
        )
    if kind == "array":
        in_range = isinstance(value, list) and 1 <= len(value) <= schema["maxItems"]
        return in_range and all(matches(each, schema["items"]) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return is_integer and 0 <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)
