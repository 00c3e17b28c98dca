"""Answers that end a request early: OpenAI's error object with a status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

MAX_MISTAKES = 11  # lines about mistakes in a body; a summary of unknown options has as many
MAX_MESSAGE = 8192  # characters; a message may quote what a client has sent


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object. A long message is cut. A lone surrogate that the message quotes
    becomes '?': UTF-8 cannot encode it."""
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}..."
    texts = [
        None if text is None else text.encode(errors="replace").decode()
        for text in (message, param)
    ]
    return {"error": {"message": texts[0], "type": kind, "param": texts[1], "code": code}}


def first_mistakes(lines: list[str]) -> str:
    """The lines, the last ones counted where they are many."""
    if len(lines) > MAX_MISTAKES:
        more = len(lines) - MAX_MISTAKES + 1
        lines = [*lines[: MAX_MISTAKES - 1], f"... and {more} more mistakes"]
    return "\n".join(lines)


def param_of(message: str) -> str | None:
    """The option that one of our error messages starts with."""
    named = re.match(r"([\w.]+)(?:\[\S+\])?(?: = | is required|: )", message)
    return named[1] if named else None


class RequestRefused(Exception):
    """Ends a request with an error status and OpenAI's error object. retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param=param_of(message), code=code)
        self.headers: Mapping[str, str] = (
            {} if retry_after is None else {"Retry-After": str(retry_after)}
        )

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))
