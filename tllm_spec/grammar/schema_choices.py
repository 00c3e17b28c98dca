"""`oneOf` is served where no value can match two of its schemas, because then it is `anyOf`."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from tllm_spec.grammar.schema_types import Resolve, Schema, is_open, kind_of, kinds_of, values_of

OVERLAP = (
    "oneOf in the JSON schema is only supported for schemas of which no value can match two, by "
    "their types, their values, or a property that is a different constant in each; use anyOf"
)


def make_any_of(schema: Schema, resolve: Resolve) -> None:
    """Replaces `oneOf`. Raises ValueError if it may mean something else."""
    branches = schema.pop("oneOf")
    if isinstance(branches, list):
        for left, right in combinations(branches, 2):
            if not _are_disjoint(_resolved(left, resolve), _resolved(right, resolve), resolve):
                raise ValueError(OVERLAP)
    schema["anyOf"] = branches


def _are_disjoint(left: object, right: object, resolve: Resolve) -> bool:
    common = kinds_of(left, resolve) & kinds_of(right, resolve)
    if not common or not isinstance(left, dict) or not isinstance(right, dict):
        return not common
    values = _constants(left), _constants(right)
    if None not in values:
        return not values[0] & values[1]  # type: ignore[operator] # no None
    return common == {"object"} and (
        _differ_in_constant(left, right, resolve) or (_lacks(left, right) and _lacks(right, left))
    )


def _differ_in_constant(left: Schema, right: Schema, resolve: Resolve) -> bool:
    """Requires the property, if it does."""
    one, two = left.get("properties"), right.get("properties")
    if not isinstance(one, dict) or not isinstance(two, dict):
        return False
    for name in one.keys() & two.keys():
        values = [_constants(_resolved(each[name], resolve)) for each in (one, two)]
        if None not in values and not values[0] & values[1]:  # type: ignore[operator] # no None
            for schema in (left, right):
                required = schema.setdefault("required", [])
                if isinstance(required, list) and name not in required:
                    required.append(name)
            return True
    return False


def _lacks(schema: Schema, other: Schema) -> bool:
    """Whether texts of the schema lack a property that the other one requires."""
    names, required = schema.get("properties"), other.get("required")
    if is_open(schema) or not names:
        return False
    return isinstance(required, list) and not set(map(str, required)) <= names.keys()


def _constants(schema: object) -> set[str] | None:
    """The only values, as text."""
    values = values_of(schema) if isinstance(schema, dict) else None
    if values is None:
        return None
    # 1.0 is 1.
    numbers = [int(each) if kind_of(each) == "integer" else each for each in values]
    return {json.dumps(each, sort_keys=True) for each in numbers}


def _resolved(schema: object, resolve: Resolve, depth: int = 32) -> Any:
    """What a schema that is only a reference stands for."""
    while isinstance(schema, dict) and "$ref" in schema and depth:
        schema, depth = resolve(schema["$ref"]), depth - 1
    return schema
