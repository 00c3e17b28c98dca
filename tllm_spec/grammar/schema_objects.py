"""Objects: names of properties that are given by patterns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from tllm_spec.config.option_checks import shown, shown_name
from tllm_spec.grammar.regexes import texts_with_match
from tllm_spec.grammar.schema_types import OPEN, Schema, is_open, types_of, values_of
from tllm_spec.grammar.string_schemas import texts_of
from tllm_spec.grammar.text_sets import Term, TextSets
from tllm_spec.grammar.text_states import has_texts, holds


def rewrite_objects(schema: Schema, sets: TextSets, placeholder: Callable[[Term], str]) -> None:
    """placeholder: a pattern that stands for a set of names. Raises ValueError for what cannot be
    kept."""
    names = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    least = schema.get("minProperties")
    least = least if type(least) is int else 0
    if "properties" not in schema and not any(each in schema for each in OPEN):
        schema["additionalProperties"] = True
    is_too_few = least > len(names) and "additionalProperties" not in schema
    if least > 1 and (is_open(schema) or is_too_few):
        raise ValueError(
            f"minProperties = {least} in the JSON schema needs properties and "
            "additionalProperties = false: other names could come twice"
        )
    if "propertyNames" in schema:
        _check_names(schema, sets, names)
    if isinstance(schema.get("patternProperties"), dict):
        _rewrite_patterns(schema, sets, names, placeholder)


def _rewrite_patterns(
    schema: Schema, sets: TextSets, names: Schema, placeholder: Callable[[Term], str]
) -> None:
    patterns: dict[str, Any] = schema["patternProperties"]
    terms = [_names_like(sets, each) for each in patterns]
    for pattern, term in zip(patterns, terms, strict=True):
        if both := [name for name in names if holds(sets, term, name)]:
            raise ValueError(
                f"the property {shown_name(both[0])!r} in the JSON schema also matches "
                f"patternProperties {shown(pattern)}, which is not supported"
            )
    _check_apart(sets, list(patterns), terms)
    schema["patternProperties"] = {
        placeholder(term): each for term, each in zip(terms, patterns.values(), strict=True)
    }


def _names_like(sets: TextSets, pattern: str) -> Term:
    try:
        term = texts_with_match(sets, pattern)
        if not has_texts(sets, term):
            raise ValueError("no text matches it")
    except ValueError as error:
        raise ValueError(f"patternProperties {shown(pattern)}: {error}") from error
    return term


def _check_apart(sets: TextSets, patterns: Sequence[str], terms: Sequence[Term]) -> None:
    for left, right in combinations(range(len(terms)), 2):
        if has_texts(sets, sets.all_of([terms[left], terms[right]])):
            raise ValueError(
                f"patternProperties {shown(patterns[left])} and {shown(patterns[right])} in the "
                "JSON schema can match the same name, which is not supported"
            )


def _check_names(schema: Schema, sets: TextSets, names: Schema) -> None:
    """Declared names that all match need no `propertyNames`, if there are no others."""
    allowed = schema["propertyNames"]
    if "patternProperties" in schema:
        raise ValueError("propertyNames next to patternProperties is not supported")
    if not names or not isinstance(allowed, dict):
        return
    if is_open({name: value for name, value in schema.items() if name != "propertyNames"}):
        raise ValueError("propertyNames next to properties needs additionalProperties = false")
    values = values_of(allowed)
    term = texts_of(sets, allowed)
    is_known = values is not None or "string" in (types_of(allowed) or ["string"])
    for name in names:
        fits = (term is None or holds(sets, term, name)) and (values is None or name in values)
        if not is_known or not fits:
            raise ValueError(
                f"the property {shown_name(name)!r} in the JSON schema does not match propertyNames"
            )
    del schema["propertyNames"]
