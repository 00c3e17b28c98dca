"""Compiles what a text must match with xgrammar. Regular expressions and constraints on strings are
our own rules, because xgrammar's keep only a part of them."""

from __future__ import annotations

import json
from typing import Any

from tllm_spec.grammar.json_schemas import SCHEMAS_OF_TAGS, schemas_of_tag
from tllm_spec.grammar.regexes import whole_texts
from tllm_spec.grammar.served_schemas import ServedSchemas
from tllm_spec.grammar.text_rules import TextRules
from tllm_spec.grammar.text_sets import TextSets

MAX_WHITESPACE = 32  # between two tokens of JSON: a small model might write nothing else
TOO_DEEP = "it is nested too deeply"


def compile_text(compiler: Any, kind: str, text: str) -> Any:
    """xgrammar's compiled grammar. Raises ValueError for what is not served, and what xgrammar
    raises."""
    try:
        if kind == "regex":
            return compiler.compile_grammar(regex_grammar(text))
        if kind in ("json_schema", "structural_tag"):
            return _compile_schemas(compiler, kind, text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    return compiler.compile_grammar(text)


def regex_grammar(expression: str) -> str:
    """EBNF for texts that match as a whole."""
    sets = TextSets()
    rules = TextRules(sets, "text_rule", is_json=False)
    rules.add("root", whole_texts(sets, expression))
    return rules.text


def _compile_schemas(compiler: Any, kind: str, text: str) -> Any:
    import xgrammar  # heavy

    source = json.loads(text)
    served = ServedSchemas(text)
    for schema in [source] if kind == "json_schema" else schemas_of_tag(source):
        served.rewrite(schema)
    if kind == "json_schema":
        grammar = xgrammar.Grammar.from_json_schema(
            json.dumps(source), max_whitespace_cnt=MAX_WHITESPACE
        )
    else:
        _rewrite_expressions(source)
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(source))
    return compiler.compile_grammar(served.with_rules(str(grammar)))


def _rewrite_expressions(tag: Any) -> None:
    """Regular expressions in a structural tag become grammars."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            if part.get("type") == "regex" and isinstance(part.get("pattern"), str):
                grammar = regex_grammar(part.pop("pattern"))
                part |= {"type": "grammar", "grammar": grammar}
            waiting += (each for name, each in part.items() if name not in SCHEMAS_OF_TAGS)
