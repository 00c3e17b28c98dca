"""Who sends a request: whose turn it counts for, and with whom it shares cached text."""

from __future__ import annotations

from hashlib import sha256
from ipaddress import IPv4Address, ip_address, ip_network
from typing import NamedTuple, Protocol

from starlette.requests import Request

MAX_NAME = 64  # characters of a user's name that are kept as they are


class NamesUser(Protocol):
    """A body that may name its user and a salt."""

    user: str | None
    safety_identifier: str | None  # OpenAI's newer name of the user
    cache_salt: str | None
    store: bool | None


class Caller(NamedTuple):
    """client: as in `LlmRequest`. cache_salt: None, or a digest of the key's name and of the
    request's own salt. store: whether the request may be recorded, as in `LlmRequest`."""

    client: tuple[str, ...] = ()
    cache_salt: str | None = None
    store: bool | None = None


NOBODY = Caller()  # the server itself


def caller_of(request: Request, body: NamesUser) -> Caller:
    """The client is the name of its key, or its address where keys have no names, and then the user
    that the body names. So a client that invents users takes no turn of another client."""
    state = request.scope["state"]
    user, own = kept_name(body.user or body.safety_identifier or ""), body.cache_salt
    salt = None
    if state["separate_cache"] or own is not None:
        key = state["client"] if state["separate_cache"] else ""
        salt = _digest(f"{key}\n{own or ''}")
    return Caller((state["client"], user), salt, body.store)


def kept_name(user: str) -> str:
    return user if len(user) <= MAX_NAME else _digest(user)


def client_of_address(address: str) -> str:
    """One client for all addresses that its host may take: of IPv6 the network of 64 bits."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a proxy that names no address
    if isinstance(found, IPv4Address) or found.ipv4_mapped is not None:
        return str(getattr(found, "ipv4_mapped", None) or found)
    return str(ip_network((found, 64), strict=False))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
