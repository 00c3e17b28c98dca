"""Checks for options given by name: which values are not served, which names are not known, and
which texts are no Unicode.

The tables of options belong to the modules that call these functions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MAX_SHOWN = 200  # characters of a value in an error message
MAX_UNKNOWN = 10  # unknown options that an error message lists
NO_PEERS: Mapping[str, str] = {}


class NotServed(NamedTuple):
    """An option of which only some values are taken. They change nothing. Of a mapping among them,
    a part is taken, too; a type stands for all of its values, a frozenset for any of its members.

    accepted: the values that say what is done here anyway. ignored: the values that are taken with
    a warning, because the text and what a client can ask for are the same without them."""

    accepted: tuple[object, ...]
    reason: str
    ignored: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether `value` is one of the accepted values. `True` is not `1`."""
        return _is_among(value, self.accepted)

    def ignores(self, value: object) -> bool:
        """Whether `value` is taken with a warning."""
        return not self.accepts(value) and _is_among(value, self.ignored)

    def refusal(self, name: str, value: str) -> str:
        """The sentence that refuses the option `name` with a value shown as `value`."""
        only = " or ".join(map(_shown_accepted, self.accepted))
        accepted = f"; accepted: {only}" if self.accepted else ""
        return f"{name} = {value} is refused: {self.reason}{accepted}"


def _shown_accepted(value: object) -> str:
    """The first entry of a mapping stands for all."""
    if not isinstance(value, Mapping) or len(value) < 2:
        return repr(value)
    return f"{repr(dict(islice(value.items(), 1)))[:-1]}, ...}}"


def _is_among(value: object, taken: tuple[object, ...]) -> bool:
    plain = value.value if isinstance(value, Enum) else value
    return any(_asks_for(plain, each) for each in taken)


def _asks_for(value: object, accepted: object) -> bool:
    if isinstance(accepted, type):
        return type(value) is accepted
    if isinstance(accepted, frozenset):
        return any(_asks_for(value, each) for each in accepted)
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        return all(
            name in accepted and _asks_for(each, accepted[name]) for name, each in value.items()
        )
    return type(value) is type(accepted) and value == accepted


def refusals(options: Mapping[str, Any], table: Mapping[str, NotServed]) -> dict[str, str]:
    """For each of `options` that `table` refuses, the sentence that says why."""
    return {
        name: table[name].refusal(name, shown(value))
        for name, value in options.items()
        if name in table and not table[name].accepts(value) and not table[name].ignores(value)
    }


def warn_of_ignored(options: Mapping[str, Any], table: Mapping[str, NotServed]) -> None:
    """Logs one line for each of `options` whose value has no effect."""
    for name, value in options.items():
        if name in table and table[name].ignores(value):
            reason = table[name].reason
            logger.warning("%s = %s has no effect: %s", name, shown(value), reason)


def refuse_not_served(options: Mapping[str, Any], table: Mapping[str, NotServed]) -> None:
    """Raises ValueError, with one line for each of `options` that `table` refuses."""
    if refused := refusals(options, table):
        raise ValueError("\n".join(refused.values()))


def unknown_options(
    options: Mapping[str, object], known: Iterable[str], peers: Mapping[str, str] = NO_PEERS
) -> list[str]:
    """For each unknown key a sentence with its value and what may have been meant. The first that
    is like no other lists the known ones.

    peers: what to use instead of options of vLLM and SGLang."""
    known, lines, has_list = sorted(known), [], False
    for path, value in options.items():
        name = path.rpartition(".")[2]
        sentence = f"{shown_name(path)} = {shown(value)} is not a known option"
        if peer := peers.get(name.replace("-", "_")):
            sentence += f"; use {peer}"
        elif close := get_close_matches(name, known, n=3):
            sentence += f"; did you mean {' or '.join(close)}?"
        elif not has_list:
            sentence += f"; known: {', '.join(known)}"
            has_list = True
        lines.append(sentence)
    return lines


def many_unknown(options: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Lines that name the first of more than MAX_UNKNOWN unknown options; no line for fewer.

    Finding similar names for thousands of keys would take seconds."""
    unknown = options.keys() - known
    if len(unknown) <= MAX_UNKNOWN:
        return []
    first = islice((name for name in options if name in unknown), MAX_UNKNOWN)
    lines = [f"{shown_name(name)} = {shown(options[name])} is not a known option" for name in first]
    return [*lines, f"... and {len(unknown) - MAX_UNKNOWN} more unknown options"]


def shown(value: object) -> str:
    """A value as error messages show it. Long values are cut."""
    text, pieces = "", _pieces(value)
    while len(text) <= MAX_SHOWN and (piece := next(pieces, None)) is not None:
        text += piece
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _pieces(value: object) -> Iterator[str]:
    """Pieces of `repr(value)`, whose whole would take long for many or for deep values."""
    if type(value) is str:
        yield repr(value[: MAX_SHOWN + 1])
    elif type(value) is dict:
        for number, (name, each) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _pieces(name)
            yield ": "
            yield from _pieces(each)
        yield "}" if value else "{}"
    elif type(value) is list:
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from _pieces(each)
        yield "]" if value else "[]"
    else:
        yield repr(value)


def shown_name(name: str) -> str:
    """An option's name as error messages show it. Long names are cut."""
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def check_text(text: str, name: str = "prompt") -> None:
    """Raises ValueError for a lone surrogate (half a character), which JSON and Python can express
    and tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"{name}: character {error.start} is {half}, one half of a surrogate pair; Unicode "
            "text is needed"
        ) from None
