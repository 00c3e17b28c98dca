"""The texts that a string's schema allows: its `pattern`, `format`, `minLength` and `maxLength`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.grammar.characters import ALL
from tllm_spec.grammar.formats import FORMATS, NOT_SERVED
from tllm_spec.grammar.regexes import texts_with_match, whole_texts
from tllm_spec.grammar.text_lengths import of_length
from tllm_spec.grammar.text_sets import Term, TextSets
from tllm_spec.grammar.text_states import has_texts

LENGTHS = ("minLength", "maxLength")
STRING_KEYWORDS = ("pattern", "format", *LENGTHS)


def texts_of(sets: TextSets, schema: Mapping[str, Any]) -> Term | None:
    """None without a constraint. Raises ValueError for what is not served, and if no text is
    left."""
    given = [name for name in STRING_KEYWORDS if schema.get(name) is not None]
    try:
        term = _matching(sets, schema)
        low, high = (_length(schema, name) for name in LENGTHS)
        if term is None and not low and high is None:
            return None
        if term is None:
            term = sets.repeat(sets.characters(ALL), low or 0, high)
            is_possible = high is None or (low or 0) <= high
        else:
            term = of_length(sets, term, low or 0, high)
            is_possible = has_texts(sets, term)
        if not is_possible:
            raise ValueError("no text matches it")
    except ValueError as error:
        values = " and ".join(f"{name} = {shown(schema[name])}" for name in given)
        raise ValueError(f"{values} in the JSON schema: {error}") from error
    return term


def _matching(sets: TextSets, schema: Mapping[str, Any]) -> Term | None:
    """The texts that match the pattern and the format; None without either."""
    pattern, kind = schema.get("pattern"), schema.get("format")
    found = []
    if pattern is not None:
        if not isinstance(pattern, str):
            raise ValueError("a regular expression is needed")
        found.append(texts_with_match(sets, pattern))
    if isinstance(kind, str) and kind in NOT_SERVED:
        raise ValueError(f"the formats {', '.join(sorted(FORMATS))} are served")
    if isinstance(kind, str) and kind in FORMATS:
        found.append(whole_texts(sets, FORMATS[kind]))
    return sets.all_of(found) if found else None


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} must be a whole number that is not negative")
    return value
