"""Checks shared by everything that takes options by name: what is not served, and what is not
known.

It knows tables and names only; the options themselves belong to the modules that call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

MAX_SHOWN = 200  # characters of a value in an error message
MAX_UNKNOWN = 10  # unknown options that an error message lists


class NotServed(NamedTuple):
    """An option of which only some values are served; without a field of its name it has no effect
    at all."""

    accepted: tuple[object, ...]
    reason: str


def refuse_not_served(options: Mapping[str, Any], table: Mapping[str, NotServed]) -> None:
    """Raises ValueError when one of `options` asks for what `table` says is not served."""
    for name, value in options.items():
        if name not in table:
            continue
        accepted, reason = table[name]
        if not any(type(value) is type(off) and value == off for off in accepted):
            only = " or ".join(repr(off) for off in accepted)
            raise ValueError(f"{name} = {shown(value)} is refused: {reason}; accepted: {only}")


def unknown_option(path: str, value: object, known: Iterable[str]) -> str:
    """A sentence that names an unknown key, its value and what may have been meant."""
    known = sorted(known)
    close = get_close_matches(path.rpartition(".")[2], known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    return f"{shown_name(path)} = {shown(value)} is not a known option; {hint}"


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
    """A value as error messages show it: a long one by its beginning only."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def shown_name(name: str) -> str:
    """An option's name as error messages show it: a long one is cut."""
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
