"""The server's options, and the keys of its clients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

# What the HTTP server grants one client, and what it keeps for the others.


ANY = "*"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class ServerOptions:
    """Times are in seconds. api_key: None, or what clients must send as a bearer token; several
    keys by the names of the clients. hosts: the names that a Host header may have, without port;
    None: any. trusted_proxies: addresses and networks whose X-Forwarded-For counts; "*": any.
    allowed_origins: of pages that a browser lets call the server; "*": any."""

    dp_size: int = 1  # engines, each with the whole model
    max_body_bytes: int = 32 << 20
    max_answer_bytes: int = 64 << 20  # of log probabilities and echoed prompts
    max_connections: int = 4096
    max_queue_size: int = 1024  # choices that wait for a place in the batch
    max_client_choices: int | None = None  # that one client has at a time on one front
    max_request_tokens: int | None = None  # of all outputs of a request
    request_timeout: float = 3600.0
    engine_timeout: float = 120.0  # without an answer, after which /health says 503
    header_timeout: float = 15.0
    body_timeout: float = 60.0
    timeout_keep_alive: float = 120.0  # uvicorn's name; Go's clients keep connections for 90 s
    drain_delay: float = 0.0  # between a signal to end and the end of accepting connections
    shutdown_timeout: float = 30.0
    api_key: str | Mapping[str, str] | None = None
    hosts: Sequence[str] | None = None
    allowed_origins: Sequence[str] = ()
    trusted_proxies: Sequence[str] = ()
    allow_control_tokens: bool = False
    tool_call_parser: str | None = None  # of chat_formats/names.py
    reasoning_parser: str | None = None  # of chat_formats/names.py
    vllm_metrics: bool = False
    otlp_traces_endpoint: str | None = None  # URL to send spans to
    draft_model_root: str | None = None  # folder of the draft weights that may be swapped in
    draft_model_key: str | None = None  # name of the key that may do so
    allow_weight_updates: bool = False
    weights_root: str | None = None  # folder of the target's weights that may be loaded
    weights_key: str | None = None  # name of the key that may do so, pause and sleep
    lora_root: str | None = None  # folder of the adapters that may be loaded
    lora_key: str | None = None  # name of the key that may do so
    lora_auto_load: bool = False  # a request may, which names a folder of lora_root
    lora_clients: Mapping[str, str] = field(default_factory=dict)  # by adapter, whose it is


def hosts_of(address: str, allowed: Sequence[str] = ()) -> Sequence[str] | None:
    """The Host names to accept at a listening address. A page from elsewhere can make a browser
    send requests to localhost, under the page's own name (DNS rebinding).

    allowed: other names; "*": any."""
    is_local = address in LOCAL_HOSTS or address.startswith("127.")
    if ANY in allowed or not (is_local or allowed):
        return None
    return sorted(LOCAL_HOSTS | {name.lower().strip("[]") for name in allowed})


# The keys that clients send, and whose they are.


FILE_MARK = "@"
NAME = re.compile(r"[\w.-]{1,64}")

Keys = str | Mapping[str, str] | None


def has_key(keys: Keys, name: str) -> bool:
    """Whether a client of this name has a key."""
    return isinstance(keys, Mapping) and name in keys


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
