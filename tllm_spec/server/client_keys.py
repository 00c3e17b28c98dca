"""The keys that clients send, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hmac import compare_digest
from pathlib import Path

FILE_MARK = "@"
NAME = re.compile(r"[\w.-]{1,64}")

Keys = str | Mapping[str, str] | None


class ClientKeys:
    """keys: None, one key, or several by the names of the clients."""

    def __init__(self, keys: Keys) -> None:
        named = {"": keys} if isinstance(keys, str) else keys or {}
        self._names = {key.strip().encode(): name for name, key in named.items()}
        self.are_several = len(self._names) > 1

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, given: bytes) -> str | None:
        """None for a wrong key. The time that it takes says nothing about the keys."""
        found = None
        for key, name in self._names.items():
            if compare_digest(given, key):
                found = name
        return found


def read_keys(given: str | None) -> Keys:
    """given: None, a key, or @ and the path of a file with lines `name: key`. Raises ValueError for
    keys that no client could send, and for a file that has a mistake."""
    if given is None:
        return None
    if not given.startswith(FILE_MARK):
        if Path(given).is_file():
            raise ValueError(f"--api_key {given} is a file: write {FILE_MARK}{given} to read it")
        return _checked("--api_key", given)
    path, keys = given[len(FILE_MARK) :], dict[str, str]()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api_key: cannot read {path}: {error}") from error
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        where = f"--api_key: line {number} of {path}"
        name, _, key = map(str.strip, line.partition(":"))
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{where} is not `name: key`; a name has 1 to 64 letters, digits, '_', '-' or '.'"
            )
        key = _checked(f"{where}: the key", key)
        if name in keys or key in keys.values():
            raise ValueError(f"{where} has a name or a key for the second time")
        keys[name] = key
    if not keys:
        raise ValueError(f"--api_key: {path} has no line `name: key`")
    return keys


def _checked(what: str, key: str) -> str:
    """The key without white space at its ends, which a mounted secret often has."""
    key = key.strip()
    if not key:
        raise ValueError(f"{what} is empty; without --api_key the server needs no key")
    if not key.isprintable():
        raise ValueError(f"{what} has a line end or a control character, which no header can have")
    return key
