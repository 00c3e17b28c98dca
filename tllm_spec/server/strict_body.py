"""Reads a JSON body. A key that an object has twice is a mistake, because only one would count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from tllm_spec.option_checks import shown_name

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _StrictRequest(Request):
    async def json(self) -> Any:
        await self.body()  # it has arrived, so this does not wait
        text = _decoded(self.scope["state"]["take_body"]())
        return json.loads(text, object_pairs_hook=_unique)


class StrictBodyRoute(APIRoute):
    """A route whose bodies have no key twice."""

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, on a request that reads its body so."""
        handle = super().get_route_handler()

        async def with_strict_body(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return with_strict_body


def _decoded(body: bytearray) -> str:
    """As json.loads decodes. The body itself is not needed any more."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    body.clear()
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
    raise HTTPException(400, f"the body has the key {shown_name(name)!r} twice")
