"""Reads a JSON body. A key that an object has twice is a mistake, because only one would count, and
so is half a character, which nothing that follows can encode.

A long body is parsed and checked in a thread, so that others are answered meanwhile."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WithJsonSchema

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.option_checks import check_text, shown_name

# The base of request bodies and of their parts.


CacheSalt = Annotated[str | None, Field(min_length=1)]


class BodyModel(ConfigModel):
    """A part of a request body. null means the default of an option, and is ignored for an unknown
    name: clients send null for options that are not set."""

    is_public: ClassVar[bool] = False

    def __init__(self, /, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if value is not None})


def as_json_type(kind: Any) -> WithJsonSchema:
    """For `/openapi.json`: a field whose validator accepts more than its type says."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


LONG_BODY = 1 << 16  # bytes; parsing or tokenising this much text takes tens of milliseconds
MAX_DIGITS = 100
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a text without it has no half character

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class InvalidBody(HTTPException):
    """A body has mistakes. FastAPI passes exceptions of this class on."""

    def __init__(self, invalid: RequestValidationError) -> None:
        super().__init__(400)
        self.invalid = invalid


class _StrictRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        """Not the body, which is not kept while its text is parsed: only whether there is one."""
        return b"-" if self.scope["state"]["body_size"] else b""

    async def json(self) -> Any:
        state = self.scope["state"]
        work = partial(_parsed, state["take_body"])
        if state["body_size"] > LONG_BODY:
            # What is valid already passes FastAPI's own check at once.
            return await run_in_threadpool(_checked, work, self._model)
        return work()


class StrictBodyRoute(APIRoute):
    """A route whose bodies are read by `Bodies`, and then by this module. A route without a body
    reads none."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, on a request that reads its body so."""
        handle = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation
        assert model is None or issubclass(model, BaseModel)

        async def with_strict_body(request: Request) -> Response:
            if model is None:
                return await handle(request)
            await request.scope["state"]["read_body"]()
            return await handle(_StrictRequest(request, model))

        return with_strict_body


def _parsed(take_body: Callable[[], bytearray]) -> Any:
    try:
        text = _decoded(take_body())
        parsed = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        half = _half_character(parsed) if HALF.search(text) else []
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not {error.encoding.upper()}") from error
    except RecursionError as error:
        raise HTTPException(400, "the body is nested too deeply") from error
    if half:
        message, *names = half
        where = ".".join(reversed(names)) or "the body"
        mistake = {"type": "half_character", "loc": ("body", where), "msg": f"{where}{message}"}
        raise InvalidBody(RequestValidationError([mistake]))
    return parsed


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


def _checked(parse: Callable[[], Any], model: type[BaseModel]) -> Any:
    """The body as an object of `model`. Raises InvalidBody."""
    parsed = parse()
    if not isinstance(parsed, dict):
        return parsed
    try:
        return model.model_validate(parsed)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found: list[dict[str, Any]] = [{**each, "loc": ("body", *each["loc"])} for each in details]
    for detail in found:
        if "error" in (context := detail.get("ctx", {})):
            context["error"] = str(context["error"])  # frames of its traceback hold the body
    parsed = None
    raise InvalidBody(RequestValidationError(found))


def _decoded(body: bytearray) -> str:
    """The text of the body. Empties the body."""
    text = body.decode(json.detect_encoding(body))
    body.clear()
    return text


def _integer(digits: str) -> int:
    """Refuses long integers: Python's conversion takes time with the square of the length."""
    if len(digits) > MAX_DIGITS:
        raise HTTPException(
            400, f"the body has a number of {len(digits)} digits; at most {MAX_DIGITS} are accepted"
        )
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    raise HTTPException(400, f"the body has the key {shown_name(name)!r} twice")
