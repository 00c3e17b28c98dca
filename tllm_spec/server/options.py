"""What the HTTP server grants one client, and what it keeps for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    allow_control_tokens: bool = False
    tool_call_parser: str | None = None  # of parsers/names.py
    reasoning_parser: str | None = None  # of parsers/reasoning.py
    vllm_metrics: bool = False
    otlp_traces_endpoint: str | None = None  # URL to send spans to
    draft_model_root: str | None = None  # folder of the draft weights that may be swapped in
    draft_model_key: str | None = None  # name of the key that may do so

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return asdict(self) | {"hosts": None if self.hosts is None else sorted(self.hosts)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ServerOptions:
        hosts = plain["hosts"]
        changed: dict[str, Any] = {"hosts": None if hosts is None else frozenset(hosts)}
        for name in ("allowed_origins", "trusted_proxies"):
            changed[name] = tuple(plain[name])
        return cls(**plain | changed)


def hosts_of(address: str, allowed: Sequence[str] = ()) -> frozenset[str] | None:
    """The Host names to accept at a listening address. A page from elsewhere can make a browser
    send requests to localhost, under the page's own name (DNS rebinding).

    allowed: other names; "*": any."""
    is_local = address in LOCAL_HOSTS or address.startswith("127.")
    if ANY in allowed or not (is_local or allowed):
        return None
    return LOCAL_HOSTS | {name.lower().strip("[]") for name in allowed}
