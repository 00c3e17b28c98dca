"""The types that a JSON schema's values have, and schemas made narrower by a type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.grammar.formats import FORMATS

Schema = dict[str, Any]
Resolve = Callable[[object], object]  # a reference's schema, None if there is none

# A number is an integer or a fraction.
KINDS: Mapping[str, frozenset[str]] = {
    **{each: frozenset({each}) for each in ("null", "boolean", "integer", "string")},
    **{each: frozenset({each}) for each in ("array", "object")},
    "number": frozenset({"integer", "fraction"}),
}
ANY = frozenset().union(*KINDS.values())
OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
BRANCHES = ("anyOf", "oneOf", "allOf")
# By type, the keywords that say something about its values only.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}


def types_of(schema: Schema) -> list[str] | None:
    """The `type` as a list; without one, the types that the other keywords are about. None for any
    type. Raises ValueError for an empty list."""
    given = schema.get("type")
    if given == []:
        raise ValueError("type = [] in the JSON schema: no text matches it")
    if given is not None:
        return given if isinstance(given, list) else [given]
    found = [name for name, keys in KEYWORDS.items() if any(map(schema.__contains__, keys))]
    if not found and schema.get("format") in FORMATS:
        return ["string"]
    return found or None


def kind_of(value: object) -> str:
    """The type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if float(value).is_integer() else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def kinds_of_types(types: list[str] | None) -> frozenset[str]:
    """The kinds of values of these types; any for a name of no type, which the compiler refuses."""
    if types is None:
        return ANY
    return frozenset().union(*(KINDS.get(str(each), ANY) for each in types))


def kinds_of(
    schema: object, resolve: Resolve, *, are_served: bool = False, depth: int = 32
) -> frozenset[str]:
    """The kinds of values that may match. are_served: of those that our texts have, which are fewer
    for a schema without a type."""
    if not isinstance(schema, dict) or not depth:
        return frozenset() if schema is False else ANY

    def below(part: object) -> frozenset[str]:
        return kinds_of(part, resolve, are_served=are_served, depth=depth - 1)

    is_plain = "type" in schema or (are_served and not schema.keys() & {"$ref", *BRANCHES})
    kinds = kinds_of_types(types_of(schema)) if is_plain else ANY
    if "$ref" in schema:
        kinds &= below(resolve(schema["$ref"]))
    for name in BRANCHES:
        if isinstance(branches := schema.get(name), list) and branches:
            each = [below(branch) for branch in branches]
            kinds &= frozenset.intersection(*each) if name == "allOf" else frozenset().union(*each)
    values = values_of(schema)
    return kinds if values is None else kinds & frozenset(map(kind_of, values))


def values_of(schema: Schema) -> list[Any] | None:
    """Those of `enum` or `const`."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def is_open(schema: Schema) -> bool:
    """Whether an object may have properties that are not declared."""
    return any(schema.get(name, False) is not False for name in OPEN)


def keep_values(schema: Schema, is_kept: Callable[[Any], bool]) -> None:
    """Leaves the values of `enum` or `const` that are kept and have the schema's type. Raises
    ValueError if there are none."""
    kinds = kinds_of_types(types_of(schema))
    values = values_of(schema) or []
    left = [each for each in values if kind_of(each) in kinds and is_kept(each)]
    if not left:
        raise ValueError(f"no value of {shown(values)} matches the rest of its JSON schema")
    schema.pop("type", None)
    if "enum" in schema:
        schema["enum"] = left


def push_type(schema: Schema, resolve: Resolve) -> None:
    """Moves a `type` next to `anyOf`, `oneOf`, `allOf` or `$ref` to where the compiler keeps it.
    Raises ValueError where it cannot."""
    types = schema.pop("type", None)
    if types is None:
        return
    types = types if isinstance(types, list) else [types]
    kinds = kinds_of_types(types)
    if "$ref" in schema and not _served(resolve(schema["$ref"]), resolve) <= kinds:
        raise ValueError(f"type = {shown(types)} next to $ref is not supported in the JSON schema")
    for name in BRANCHES:
        if isinstance(branches := schema.get(name), list):
            narrow = [_narrowed(each, types, resolve) for each in branches]
            schema[name] = [each for each in narrow if each is not False]
            if not schema[name]:
                raise ValueError(f"no schema of {name} has the type {shown(types)}")


def _served(schema: object, resolve: Resolve) -> frozenset[str]:
    return kinds_of(schema, resolve, are_served=True)


def _narrowed(branch: object, types: list[str], resolve: Resolve) -> object:
    """A schema for the values of the types only; False if there are none."""
    kinds = kinds_of_types(types)
    own = kinds_of(branch, resolve)
    if not isinstance(branch, dict) or own <= kinds:
        return {"type": types} if branch is True else branch
    if not own & kinds:
        return False
    both = [name for name, each in KINDS.items() if each <= own & kinds]
    # An integer is a number already.
    return branch | {"type": [each for each in both if each != "integer" or "number" not in both]}
