"""Arrays in the forms that xgrammar keeps: it reads missing `items` as none."""

from __future__ import annotations

from tllm_spec.grammar.schema_types import Schema

BOUNDS = ("minItems", "maxItems")


def rewrite_arrays(schema: Schema) -> None:
    if isinstance(schema.get("items"), list):  # a tuple of drafts before 2020-12
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    for name in ("additionalItems", "minContains", "maxContains"):  # without effect, so alone
        schema.pop(name, None)
    first, (low, high) = schema.get("prefixItems"), map(schema.get, BOUNDS)
    if isinstance(first, list) and type(high) is int and high <= len(first):
        schema["prefixItems"] = first = first[:high]
        schema["items"] = False
        if not first:
            del schema["prefixItems"]
    is_closed = "items" in schema or "unevaluatedItems" in schema
    num_first = len(first) if isinstance(first, list) else 0
    if not is_closed and (not num_first or (type(low) is int and low > num_first)):
        schema["items"] = True
