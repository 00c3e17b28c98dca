"""Turns what a text must match into a grammar of llguidance, and compiles that within limits."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from tllm_spec.grammar.guided_decoding import MAX_GRAMMAR_CHARS, GrammarSource
from tllm_spec.grammar.structural_tags import WHITESPACE, NamedTokens, TagGrammar

JSON_OPTIONS = {"lenient": False, "whitespace_pattern": WHITESPACE}
# What a grammar may cost, for the compiler and for one mask. The largest mask that ends within
# them takes some tens of milliseconds.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_max_items": 3_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_CHARS = 2 * MAX_GRAMMAR_CHARS  # of what is made of a structural tag
# The time of a compilation grows with the square of the first two, and with the third.
MAX_EBNF_RULES = 500
MAX_PATTERN_NAMES = 32  # of a schema's `patternProperties`
MAX_MULTIPLE = 100_000
# A compilation takes twice as long with each pattern or format that holds next to others.
MAX_JOINED = 12
JOINS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
    | {"discriminator", "examples", "readOnly", "title", "type", "writeOnly"}
)
NOTES = ("$comment", "description", "title")
# llguidance goes through all of the text that is forced for each mask, and allows only its usual
# tokens. Where the text may be long, it is told not to: then such text is not drafted, and may be
# spelt with other tokens, as the fixed texts of structural tags may.
MAX_FORCED = 1 << 12
NO_FORCING = '%llguidance {"no_forcing": true}'
MAX_REASON_CHARS = 300
NO_TEXT = "no text matches it"
TOO_DEEP = "it is nested too deeply"
# Keywords whose values are no schemas, and those that have schemas by name.
VALUES = frozenset({"const", "default", "enum", "examples"})
NAMED_PARTS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
# Of EBNF: texts, classes and escapes in them, comments, and line ends before an alternative.
EBNF_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\s*\n\s*(?=\|)', flags=re.DOTALL
)
NEGATED_CLASS = re.compile(r"\\.|\[\^(?:\\.|[^\]\\])+\]", flags=re.DOTALL)
CODE_ESCAPE = re.compile(r"\\(?:x(..)|u(....)|U(.{8})|(.))", flags=re.DOTALL)


NO_NAMES = NamedTokens()


def compiled(source: GrammarSource, tokenizer: Any, tokens: NamedTokens = NO_NAMES) -> Any:
    """An `LLMatcher` at the beginning of a text. tokenizer: an `LLTokenizer`. tokens: that literals
    of structural tags may name. Raises ValueError for a grammar with mistakes, that no text
    matches, or that is over a limit. Deep grammars need a deep stack."""
    from llguidance import LLMatcher, LLParserLimits  # an extra

    try:
        text = grammar_text(source, tokens)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # tells whether a text can begin, and is kept for the first
        if matcher.is_error():
            raise ValueError(reason_of(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            raise ValueError(warnings[0])
    except RecursionError:
        raise ValueError(f"guided_decoding = {source.kind}: {TOO_DEEP}") from None
    except ValueError as error:
        raise ValueError(f"guided_decoding = {source.kind}: {error}") from error
    return matcher


def reason_of(error: str) -> str:
    """llguidance's message without its hint to an option, and without the grammar."""
    if "NoExtension" in error:
        return NO_TEXT
    return re.split(r"\n<|\. Enable", error)[0].strip()[:MAX_REASON_CHARS]


def grammar_text(source: GrammarSource, tokens: NamedTokens = NO_NAMES) -> str:
    """The grammar as llguidance's JSON. Raises ValueError."""
    if source.kind == "structural_tag":
        made = TagGrammar(json_grammar, regex_lark, ebnf_lark, tokens).of(json.loads(source.text))
    elif source.kind == "json_schema":
        schema = {"name": "schema", **json_grammar(json.loads(source.text))}
        made = [{"lark_grammar": "start: @schema"}, schema]
    else:
        lark = {"regex": regex_lark, "choice": choice_lark, "grammar": ebnf_lark}
        made = [{"lark_grammar": lark[source.kind](source.text)}]
    if source.kind == "structural_tag" or forces_much(source):
        made[0]["lark_grammar"] = f"{NO_FORCING}\n{made[0]['lark_grammar']}"
    text = json.dumps({"grammars": made})
    if source.kind == "structural_tag" and len(text) > MAX_CHARS:
        raise ValueError(f"its grammar has {len(text)} characters; at most {MAX_CHARS} are served")
    return text


def forces_much(source: GrammarSource) -> bool:
    """Whether the text that follows may be forced for more than `MAX_FORCED` characters, as far as
    can be told from the grammar's texts and repetitions."""
    is_one = source.kind in ("regex", "grammar")
    return any(
        len(text) * max(_counts(text, r"[^)]"), default=1) * math.prod(_counts(text, r"\)"))
        > MAX_FORCED
        for text in ([source.text] if is_one else source.text.split('"'))
    )


def _counts(text: str, before: str) -> list[int]:
    """How often what ends with `before` is repeated, for each of its repetitions."""
    found = re.findall(before + r"\{(\d+)(?:,(\d*))?\}", text)
    return [max(1, *(int(each) for each in pair if each)) for pair in found]


def choice_lark(text: str) -> str:
    """One of a JSON list of texts. As one terminal: many alternatives of a rule would be many items
    of the parser's."""
    texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(text)]
    return f"start: CHOICE\nCHOICE: {' | '.join(texts)}"


def json_grammar(schema: Any) -> dict[str, Any]:
    """A grammar of a schema's texts."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(NO_TEXT if schema is False else "a JSON schema is an object")
    text = json.dumps(schema)
    if '"x-guidance"' in text:
        raise ValueError("x-guidance in a JSON schema is refused: its options are not the client's")
    may_join = text.count('"pattern": "') + text.count('"format": "') <= MAX_JOINED
    return {"json_schema": {**_checked(schema, may_join), "x-guidance": JSON_OPTIONS}}


def _checked(schema: Any, may_join: bool) -> Any:
    """The schema without `uniqueItems: false`, which says nothing and is not known, and with
    patterns as llguidance keeps them. may_join: schemas may hold together. Raises ValueError for
    what would take long to compile."""
    if isinstance(schema, list):
        return [_checked(each, may_join) for each in schema]
    if not isinstance(schema, dict):
        return schema
    names = schema.get("patternProperties")
    if isinstance(names, dict) and len(names) > MAX_PATTERN_NAMES:
        raise ValueError(f"patternProperties has more than {MAX_PATTERN_NAMES} names")
    if not may_join and _joins(schema):
        raise ValueError(
            f"more than {MAX_JOINED} patterns and formats, where schemas hold together (allOf, or "
            "keywords next to $ref, anyOf or oneOf)"
        )
    divisor = schema.get("multipleOf")
    is_number = isinstance(divisor, int | float) and not isinstance(divisor, bool)
    if is_number and _digits(divisor) > MAX_MULTIPLE:
        raise ValueError(f"multipleOf = {divisor}: at most {MAX_MULTIPLE} are served")
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            made[name] = _without_nul(value)
        elif name in NAMED_PARTS and isinstance(value, dict):
            is_pattern = name == "patternProperties"
            made[name] = {
                _without_nul(each) if is_pattern else each: _checked(part, may_join)
                for each, part in value.items()
            }
        elif name != "uniqueItems" or value is not False:
            made[name] = value if name in VALUES else _checked(value, may_join)
    return made


def without_notes(schema: Any) -> Any:
    """The schema without descriptions, which change no text that matches."""
    if isinstance(schema, list):
        return [without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in VALUES else without_notes(value)
        for name, value in schema.items()
        if name not in NOTES or not isinstance(value, str)  # a member may have such a name
    }


def _joins(schema: dict[str, Any]) -> bool:
    """Whether several schemas of it hold for the same value."""
    joined = JOINS & schema.keys()
    several = schema.get("allOf")
    is_list = isinstance(several, list) and len(several) > 1
    return is_list or (bool(joined) and len(schema.keys() - ANNOTATIONS) > 1)


def _without_nul(pattern: str) -> str:
    """Negated classes without U+0000. In a JSON string a class with all control characters would
    also stand for quotes and backslashes that it excludes (llguidance 1.9.1)."""
    return NEGATED_CLASS.sub(
        lambda found: f"[{found[0]}&&[^\\x00]]" if found[0][0] == "[" else found[0], pattern
    )


def _digits(number: Any) -> int:
    """Without its zeros at the end and its point."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))


def regex_lark(expression: str) -> str:
    r"""Texts that match as a whole; `\d` and `\w` are ASCII's, as in a schema's `pattern`."""
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(expression, 'dw')}/"


def ebnf_lark(text: str) -> str:
    """EBNF as Lark. Raises ValueError for mistakes."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") > MAX_EBNF_RULES:
        raise ValueError(f"it has more than {MAX_EBNF_RULES} rules")
    try:
        return gbnf_to_lark(EBNF_PART.sub(_plain_part, text))
    except RecursionError:
        raise
    except Exception as error:  # the converter has no class for all of its errors
        raise ValueError(f"EBNF: {error}"[:MAX_REASON_CHARS]) from error


def _plain_part(found: re.Match[str]) -> str:
    """The part as the converter reads it."""
    part = found[0]
    return CODE_ESCAPE.sub(_plain_escape, part) if part[0] in '"[' else " "


def _plain_escape(found: re.Match[str]) -> str:
    """The character of an escape, unless it means something else as it is."""
    code = next(filter(None, found.groups()[:3]), None)
    if code is None:
        return {"-": r"\x2d", "/": "/", "^": r"\x5e"}.get(found[4], found[0])
    character = chr(int(code, 16))
    if character in '"\\[]':
        return f"\\{character}"
    return character if character.isprintable() and character not in "-^" else found[0]
