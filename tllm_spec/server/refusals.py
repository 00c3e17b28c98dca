"""Answers that end a request early: OpenAI's error object with a status, or Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from tllm_spec.config.engine_config import NO_KV_EVENTS
from tllm_spec.request_errors import described

MAX_MISTAKES = 11  # lines about mistakes in a body; a summary of unknown options has as many
RETRY_AFTER = 1  # seconds
MAX_MESSAGE = 8192  # characters; a message may quote what a client has sent


# The routes below this path have Anthropic's error object, with its types by status.
MESSAGES_PATH = "/v1/messages"
MESSAGES_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def first_mistakes(message: str) -> str:
    """The message, whose last lines are counted where they are many."""
    lines = message.splitlines()
    if len(lines) > MAX_MISTAKES:
        more = len(lines) - MAX_MISTAKES + 1
        lines = [*lines[: MAX_MISTAKES - 1], f"... and {more} more mistakes"]
    return "\n".join(lines)


def param_of(message: str) -> str | None:
    """The option that one of our error messages starts with."""
    named = re.match(r"([\w.]+)(?:\[\S+\])?(?: = | is required|: )", message)
    return named[1] if named else None


class RequestRefused(Exception):
    """Ends a request with an error status and OpenAI's error object. kind: by default of the
    client's mistakes or, from status 500 on, of ours. retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        *,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        # A message may quote a lone surrogate, which UTF-8 cannot encode.
        message = message.encode(errors="replace").decode()
        kind = kind or ("invalid_request_error" if status < 500 else "internal_error")
        param = param_of(message) if status < 500 else None
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers: Mapping[str, str] = (
            {} if retry_after is None else {"Retry-After": str(retry_after)}
        )

    @property
    def messages_body(self) -> dict[str, Any]:
        """Anthropic's error object."""
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind, message = MESSAGES_KINDS.get(self.status, usual), self.body["error"]["message"]
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str = "") -> JSONResponse:
        """In the form of the path's API, as far as it is known."""
        is_messages = f"{path}/".startswith(f"{MESSAGES_PATH}/")
        body = self.messages_body if is_messages else self.body
        return JSONResponse(body, self.status, self.headers)


def overloaded(status: int, message: str) -> RequestRefused:
    """What a client may send again after a while."""
    return RequestRefused(status, message, "overloaded", retry_after=RETRY_AFTER)


# Routes of TensorRT-LLM's and vLLM's servers, with the reason.
ROUTES_NOT_SERVED: Mapping[str, str] = {
    "/kv_cache_events": NO_KV_EVENTS,
    "/v1/embeddings": "answers are text",
    **dict.fromkeys(
        (f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")),
        "--lora_root and --lora_key say who may load which adapters",
    ),
}


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


async def _refused(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, RequestRefused)
    return refusal.response(request.scope["path"])


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message, headers = error.detail, error.headers
    if error.status_code == 405:
        allowed = _allowed_methods(request)
        message = f"{request.url.path} takes {allowed}, not {request.method}"
        headers = {"Allow": allowed}
    if error.status_code == 404:  # the router's: routes raise RequestRefused
        reason = ROUTES_NOT_SERVED.get(request.url.path)
        because = f": {reason}" if reason else ""
        message = (
            f"{request.method} {request.url.path} is not served here{because}; GET / says how to "
            "call this server, GET /openapi.json lists its routes"
        )
    refusal = RequestRefused(error.status_code, message, "invalid_request_error")
    refusal.headers = headers or {}
    return refusal.response(request.scope["path"])


def _allowed_methods(request: Request) -> str:
    """Methods of all routes with the request's path; the router names the first one's only."""
    routes = [each for each in request.app.routes if each.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for each in routes for method in each.methods}))


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    return RequestRefused(500, described(error)).response(request.scope["path"])
