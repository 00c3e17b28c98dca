"""What a text must match: TensorRT-LLM's `GuidedDecodingParams`, reduced to one grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any, Literal

from tllm_spec.config.option_checks import check_text, shown

MAX_GRAMMAR_CHARS = 1 << 16
MAX_TAG_CHARS = 1 << 18  # of a structural tag, whose grammar is much shorter
Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "thinking_budget"]
# The escape of one half of a surrogate pair, after whole escapes of a backslash.
HALF_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")


def compiler_name() -> str:
    """What compiles grammars, with its version: guided texts of a seed depend on it."""
    return f"llguidance {version('llguidance')}"


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as text: a JSON schema, a regular expression, a JSON list of choices, EBNF, a
    structural tag, or a budget of reasoning with or without a grammar (`Budget.source`)."""

    kind: Kind
    text: str


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams:
    """The text matches exactly one of these. Raises ValueError for none, several, or more than
    `MAX_GRAMMAR_CHARS` characters, of a structural tag `MAX_TAG_CHARS`."""

    json: str | Mapping[str, Any] | bool | type | None = None
    """A JSON schema: a dict, its text, or a pydantic model."""
    regex: str | None = None
    """A regular expression for the whole text."""
    grammar: str | None = None
    """A grammar in EBNF, whose first rule is `root`."""
    json_object: bool = False
    """Any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """A structural tag in xgrammar's format: free text with parts that follow a schema."""
    choice: Sequence[str] | None = None
    """One of these strings."""

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"guided_decoding has {', '.join(given) or 'nothing'}; exactly one of "
                f"{', '.join(names)} is needed"
            )
        length = len(self.source.text)
        most = MAX_GRAMMAR_CHARS if self.structural_tag is None else MAX_TAG_CHARS
        if length > most:
            raise ValueError(
                f"guided_decoding.{given[0]} has {length} characters; at most {most} are accepted"
            )

    @classmethod
    def of(cls, value: Any) -> GuidedDecodingParams:
        """The same, or one made of a mapping. Raises ValueError for unknown keys."""
        if isinstance(value, cls):
            return value
        names = {each.name for each in fields(cls)}
        if not isinstance(value, Mapping) or (unknown := set(value) - names):
            wrong = shown(value) if not isinstance(value, Mapping) else shown(sorted(unknown)[0])
            raise ValueError(f"guided_decoding = {wrong}: {', '.join(sorted(names))} are accepted")
        return cls(**value)

    @property
    def source(self) -> GrammarSource:
        """Raises ValueError for a value of a wrong type."""
        if self.json is not None and self.json is not False:
            return GrammarSource("json_schema", _schema_text(self.json))
        if self.json_object:
            return GrammarSource("json_schema", '{"type": "object"}')
        if self.choice is not None:
            return GrammarSource("choice", _choice_text(self.choice))
        if self.structural_tag is not None:
            return GrammarSource(
                "structural_tag", _json_text("structural_tag", self.structural_tag)
            )
        if self.regex is not None:
            return GrammarSource("regex", _text("regex", self.regex))
        return GrammarSource("grammar", _text("grammar", self.grammar))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"guided_decoding.{name} = {shown(value)}: a non-empty text is needed")
    check_text(value, f"guided_decoding.{name}")
    if half := HALF_ESCAPE.search(value):
        raise ValueError(
            f"guided_decoding.{name}: character {half.start()} is the escape of one half of a "
            "surrogate pair; write the character itself"
        )
    return value


def _json_text(name: str, value: object) -> str:
    """JSON as text, whichever way it was given."""
    try:
        return json.dumps(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"guided_decoding.{name} is not JSON: {error}") from error


def _schema_text(schema: object) -> str:
    if isinstance(schema, type):
        to_schema = getattr(schema, "model_json_schema", None)
        if to_schema is None:
            raise ValueError(
                f"guided_decoding.json = {schema!r}: a JSON schema or a pydantic model is needed"
            )
        schema = to_schema()
    return _json_text("json", schema)


def _choice_text(choice: object) -> str:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not (is_list and choice and all(isinstance(each, str) and each for each in choice)):  # type: ignore[attr-defined] # checked by is_list
        raise ValueError(
            f"guided_decoding.choice = {shown(choice)}: a list of non-empty strings is needed"
        )
    for each in choice:  # type: ignore[attr-defined] # the same
        check_text(each, "guided_decoding.choice")
    return json.dumps(choice if isinstance(choice, list) else list(choice))  # type: ignore[call-overload] # the same
