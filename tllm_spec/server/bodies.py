"""The bodies of requests: each is read when its route wants it, within limits of size, time and
number of values, and within its client's share of what the server keeps.

A JSON key that an object has twice is a mistake, because only one would count, and so is half a
character, which nothing that follows can encode. A long body is parsed and checked in a thread."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, ClassVar, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Discriminator, TypeAdapter, ValidationError, WithJsonSchema

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.option_checks import check_text, shown_name
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.refusals import RequestRefused, first_mistakes, overloaded

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

LARGE_BODY = 1 << 20  # bytes; only one such body is parsed and tokenised at a time
NUM_SMALL = 32  # bodies of this size that one client may have at a time, besides large ones
NUM_CLIENTS = 4  # that may have their whole share at a time; of more each has less
# A body's text is cheap, its values are not: a parsed one takes up to 200 bytes.
MAX_VALUES = 1 << 19
SEPARATORS = (b",", b":", b"[", b"{")
# Python stores a text that has one such character with two or four bytes for each of all its
# characters.
WIDE = re.compile(rb"[\xc4-\xff]|\\u")
WIDTH = 4


class Disconnected(Exception):
    """The client has gone before its body was complete."""


class Bodies:
    """Reads bodies. The first `LARGE_BODY` bytes of each have a share of their own, so that small
    bodies never wait for large ones, of another client or of the same."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._shares = _Shares(NUM_SMALL * LARGE_BODY), _Shares(options.max_body_bytes)
        self._one_large = asyncio.Lock()

    async def read(self, state: Any, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        """Reads a body to its end. In the scope's state it leaves

        - `take_body`, which returns the body: what parses it empties it.
        - `body_size`, and `release_body`, which a route may call when it is done with the body. It
          is also called when the answer begins.

        Raises RequestRefused, and Disconnected."""
        self._check_head(headers)
        body, held = bytearray(), _Held(state["client"], self._shares)
        state["at_end"].append(held.release)
        seconds = self._options.body_timeout
        try:
            await asyncio.wait_for(self._read(body, held, receive), seconds)
            if len(body) > LARGE_BODY:
                await self._one_large.acquire()
                held.turn = self._one_large
            state |= {"take_body": lambda: body, "body_size": len(body)}
            state["release_body"] = held.release
        except asyncio.TimeoutError:
            raise RequestRefused(408, f"the body has not arrived within {seconds:g} s") from None
        finally:
            if "release_body" not in state:
                body.clear()  # a traceback of this frame would keep it
                held.release()

    def _check_head(self, headers: Mapping[bytes, bytes]) -> None:
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestRefused(
                415, f"Content-Encoding = {encoding[:100]!r} is not served; send the body as it is"
            )
        if int(headers.get(b"content-length", b"0")) > self._options.max_body_bytes:
            raise self._too_large()

    async def _read(self, body: bytearray, held: _Held, receive: Receive) -> None:
        more, num_values, is_wide = True, 0, False
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            piece, more = message.get("body", b""), message.get("more_body", False)
            body += piece
            if len(body) > self._options.max_body_bytes:
                raise self._too_large()
            held.grow_to(len(body))
            # Each piece is counted as it comes, since counting the whole would take long.
            num_values += sum(map(piece.count, SEPARATORS))
            is_wide = is_wide or bool(WIDE.search(body, max(0, len(body) - len(piece) - 1)))
        self._check_parsed_size(len(body), num_values, is_wide=is_wide)

    def _check_parsed_size(self, num_bytes: int, num_values: int, *, is_wide: bool) -> None:
        if num_values > MAX_VALUES:
            raise RequestRefused(
                413, f"the body has more than {MAX_VALUES} JSON values; send several bodies"
            )
        longest = self._options.max_body_bytes // WIDTH
        if num_bytes > longest and is_wide:
            raise RequestRefused(
                413,
                f"the body is too large: at most {longest} bytes are accepted of a text with "
                "characters that are not Latin; send several bodies",
            )

    def _too_large(self) -> RequestRefused:
        limit = self._options.max_body_bytes
        return RequestRefused(413, f"the body is too large: at most {limit} bytes are accepted")


class _Shares:
    """Bytes that are kept for clients. share: of one client."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._num_bytes = 0
        self._of_clients: Counter[str] = Counter()

    def take(self, client: str, num_bytes: int) -> None:
        """Counts bytes, also when it raises RequestRefused because they are too many."""
        self._num_bytes += num_bytes
        self._of_clients[client] += num_bytes
        share, limit = self._share, NUM_CLIENTS * self._share
        if self._num_bytes > limit:
            share = min(share, limit // len(self._of_clients))
        if self._of_clients[client] > share:
            raise overloaded(503, "too many large bodies at once")

    def give_back(self, client: str, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._of_clients[client] -= num_bytes
        if not self._of_clients[client]:
            del self._of_clients[client]


class _Held:
    """What one body takes of its client's shares, for its small part and for the rest, and of the
    turns of large bodies."""

    def __init__(self, client: str, shares: tuple[_Shares, _Shares]) -> None:
        self._client, self._shares = client, shares
        self._taken = [0, 0]
        self.turn: asyncio.Lock | None = None

    def grow_to(self, size: int) -> None:
        """size: bytes of the body so far. Raises RequestRefused."""
        parts = min(size, LARGE_BODY), max(0, size - LARGE_BODY)
        for number, (shares, part) in enumerate(zip(self._shares, parts, strict=True)):
            if more := part - self._taken[number]:
                self._taken[number] = part
                shares.take(self._client, more)

    def release(self) -> None:
        """Gives everything back. May be called twice."""
        for number, shares in enumerate(self._shares):
            taken, self._taken[number] = self._taken[number], 0
            if taken:
                shares.give_back(self._client, taken)
        if self.turn is not None:
            gc.collect()  # cycles of exceptions and frames may hold what was parsed
            self.turn.release()
            self.turn = None


class BodyModel(ConfigModel):
    """A part of a request body. null means the default of an option, and is ignored for an unknown
    name: clients send null for options that are not set."""

    is_public: ClassVar[bool] = False

    def __init__(self, /, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if value is not None})


def as_json_type(kind: Any) -> WithJsonSchema:
    """For `/openapi.json`: a field whose validator accepts more than its type says."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


def by_type(refusal: str, default: str | None = None) -> Discriminator:
    """Chooses of a union of objects with tags by their `type`. default: of an object without one.
    refusal: what is said of others."""

    def kind_of(given: Any) -> Any:
        return (given.get("type") or default) if isinstance(given, dict) else given

    return Discriminator(kind_of, custom_error_type="type", custom_error_message=refusal)


NOT_AN_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
LONG_BODY = 1 << 16  # bytes; parsing or tokenising this much text takes tens of milliseconds
MAX_DIGITS = 100
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a text without it has no half character

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Made = TypeVar("Made")


class StrictBodyRoute(APIRoute):
    """A route whose bodies are read by `Bodies`, and then by this module. A route without a body
    reads none."""

    def get_route_handler(self) -> Handler:
        """A handler that calls the route's function with the body and the request."""
        if self.body_field is None:
            return super().get_route_handler()
        model, endpoint = self.body_field.field_info.annotation, self.endpoint
        assert isinstance(model, type) and issubclass(model, BaseModel)
        call = endpoint if iscoroutinefunction(endpoint) else partial(run_in_threadpool, endpoint)

        async def with_body(request: Request) -> Response:
            state = request.scope["state"]
            await state["read_body"]()
            if not state["body_size"] or not _is_json(request.headers.get("content-type", "")):
                raise RequestRefused(400, NOT_AN_OBJECT)
            body = await made_of_body(request, parsed_body, state["take_body"], model)
            answer = await call(body, request)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return with_body


async def made_of_body(request: Request, make: Callable[..., Made], *arguments: Any) -> Made:
    """What `make` makes of a request's body: in a thread if that is long."""
    is_long = request.scope["state"]["body_size"] > LONG_BODY
    return await run_in_threadpool(make, *arguments) if is_long else make(*arguments)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return re.fullmatch(r"application/(.+\+)?json", kind) is not None


def parsed_body(take_body: Callable[[], bytearray], model: type[BaseModel]) -> BaseModel:
    """The body as an object of `model`. Raises RequestRefused."""
    try:
        text = _decoded(take_body())
        parsed = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        half = _half_character(parsed) if HALF.search(text) else []
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg}, at character {error.pos}"
        raise RequestRefused(400, message) from error
    except UnicodeDecodeError as error:
        raise RequestRefused(400, f"the body is not {error.encoding.upper()}") from error
    except RecursionError as error:
        raise RequestRefused(400, "the body is nested too deeply") from error
    if half:
        message, *names = half
        raise RequestRefused(400, f"{'.'.join(reversed(names)) or 'the body'}{message}")
    if not isinstance(parsed, dict):
        raise RequestRefused(400, NOT_AN_OBJECT)
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        causes = [str(each.get("ctx", {}).get("error") or each["msg"]) for each in details]
    del text, parsed, details  # the traceback's frames would keep the body
    raise RequestRefused(400, first_mistakes("\n".join(causes)))


def _half_character(value: Any) -> list[str]:
    """What is said of a lone surrogate in a string or key of `value`, and then the names of the
    values that have it, the innermost first. Empty without one."""
    if isinstance(value, str):
        try:
            check_text(value, name="")
        except ValueError as error:
            return [str(error)]
        return []
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    for name, each in pairs:
        if found := _half_character(name) or _half_character(each):
            return [*found, shown_name(str(name))]
    return []


def _decoded(body: bytearray) -> str:
    """The text of the body. Empties the body."""
    text = body.decode(json.detect_encoding(body))
    body.clear()
    return text


def _integer(digits: str) -> int:
    """Refuses long integers: Python's conversion takes time with the square of the length."""
    if len(digits) > MAX_DIGITS:
        raise RequestRefused(
            400, f"the body has a number of {len(digits)} digits; at most {MAX_DIGITS} are accepted"
        )
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    raise RequestRefused(400, f"the body has the key {shown_name(name)!r} twice")
