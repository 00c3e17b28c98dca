"""Rewrites JSON schemas so that xgrammar keeps them. What it does not keep is refused.

Strings with a constraint become placeholders, patterns of a text that occurs nowhere else. Where
they stand in the grammar that xgrammar makes, our own rules come in."""

from __future__ import annotations

import re
from typing import Any

from tllm_spec.grammar.json_schemas import CONSTRAINTS, parts_of
from tllm_spec.grammar.schema_arrays import rewrite_arrays
from tllm_spec.grammar.schema_choices import make_any_of
from tllm_spec.grammar.schema_numbers import rewrite_numbers
from tllm_spec.grammar.schema_objects import rewrite_objects
from tllm_spec.grammar.schema_types import Schema, keep_values, push_type, types_of, values_of
from tllm_spec.grammar.string_schemas import STRING_KEYWORDS, texts_of
from tllm_spec.grammar.text_rules import TextRules
from tllm_spec.grammar.text_sets import Term, TextSets
from tllm_spec.grammar.text_states import holds

NOT_IN_JSON = "pattern, format and lengths are only supported where the text is JSON"


class ServedSchemas:
    """The schemas of one grammar. text: all of it, from which placeholders and the names of our
    rules must differ."""

    def __init__(self, text: str) -> None:
        self._mark = "placeholder"
        while self._mark in text:
            self._mark += "s"
        self._sets = TextSets()
        self._rules = TextRules(self._sets, self._mark, is_json=True)
        self._numbers: dict[Term, int] = {}

    def rewrite(self, schema: object) -> None:
        """Changes the schema itself. Raises ValueError for a constraint that cannot be kept."""
        for part in parts_of(schema):
            _Part(part, schema, self).rewrite()

    def with_rules(self, grammar: str) -> str:
        """xgrammar's grammar of the schemas, with our rules. Raises ValueError for constraints in
        text that is not JSON."""
        if not self._numbers:
            return grammar
        found = rf'Regex\("\^{self._mark}(\d+)x\\\?\$", json_string=true\)'
        if self._mark in re.sub(found, "", grammar):
            raise ValueError(NOT_IN_JSON)
        return re.sub(found, rf"({self._mark}_\1)", grammar) + f"\n{self._rules.text}"

    @property
    def sets(self) -> TextSets:
        return self._sets

    def placeholder(self, term: Term) -> str:
        """A pattern that stands for the texts inside a string."""
        if term not in self._numbers:
            self._numbers[term] = len(self._numbers)
            self._rules.add(f"{self._mark}_{self._numbers[term]}", term)
        # xgrammar writes a pattern with a quantifier into its grammar as it is.
        return f"^{self._mark}{self._numbers[term]}x?$"


class _Part:
    """One schema of `root`."""

    def __init__(self, schema: Schema, root: object, served: ServedSchemas) -> None:
        self._schema = schema
        self._root = root
        self._served = served

    def rewrite(self) -> None:
        schema = self._schema
        if schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            push_type(schema, self._resolve)
            if "oneOf" in schema:
                make_any_of(schema, self._resolve)
        elif values_of(schema) is not None:
            self._rewrite_values()
        elif types := types_of(schema):
            schema["type"] = types if len(types) > 1 else types[0]
            self._rewrite_types([str(each) for each in types])

    def _rewrite_values(self) -> None:
        """Applies the constraints of strings to the values of `const` or `enum`; refuses others."""
        sets, schema = self._served.sets, self._schema
        name = "const" if "const" in schema else "enum"
        if others := sorted(CONSTRAINTS & schema.keys() - {*STRING_KEYWORDS, name}):
            raise ValueError(f"{others[0]} next to {name} is not supported in the JSON schema")
        term = texts_of(sets, schema)
        keep_values(
            schema, lambda each: term is None or type(each) is not str or holds(sets, term, each)
        )
        for each in STRING_KEYWORDS:
            schema.pop(each, None)

    def _rewrite_types(self, types: list[str]) -> None:
        schema = self._schema
        term = texts_of(self._served.sets, schema) if "string" in types else None
        for each in STRING_KEYWORDS:
            schema.pop(each, None)
        if term is not None:
            schema["pattern"] = self._served.placeholder(term)
        if {"integer", "number"} & set(types):
            rewrite_numbers(schema, types)
        if "array" in types:
            rewrite_arrays(schema)
        if "object" in types:
            rewrite_objects(schema, self._served.sets, self._served.placeholder)

    def _resolve(self, reference: object) -> object:
        """What `#/a/b` stands for; None if there is nothing."""
        found: Any = self._root
        for name in str(reference).split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        return found
