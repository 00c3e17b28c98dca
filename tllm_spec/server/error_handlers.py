"""Exceptions of routes as OpenAI's error objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from tllm_spec.config.engine_config import NO_KV_EVENTS
from tllm_spec.request_errors import described
from tllm_spec.server.refusals import RequestRefused, error_body, first_mistakes, param_of
from tllm_spec.server.streaming import EngineError
from tllm_spec.server.strict_body import InvalidBody

# Routes of TensorRT-LLM's and vLLM's servers, with the reason.
ROUTES_NOT_SERVED: Mapping[str, str] = {
    "/kv_cache_events": NO_KV_EVENTS,
    "/v1/embeddings": "answers are text",
}


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(EngineError, _engine_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(InvalidBody, _invalid_long_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


async def _refused(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, RequestRefused)
    return refusal.response()


async def _engine_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EngineError)
    return JSONResponse(error_body(str(error), error.kind), error.status)


async def _invalid_body(request: Request, invalid: Exception) -> JSONResponse:
    assert isinstance(invalid, RequestValidationError)
    lines = [line for detail in invalid.errors() for line in _cause(detail).splitlines()]
    message = first_mistakes(lines)
    if any(
        detail["loc"] == ("body",) and "error" not in detail.get("ctx", {})
        for detail in invalid.errors()
    ):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    return JSONResponse(error_body(message, "invalid_request_error", param=param_of(message)), 400)


async def _invalid_long_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidBody)
    return await _invalid_body(request, error.invalid)


def _cause(detail: Mapping[str, Any]) -> str:
    cause = detail.get("ctx", {}).get("error") or detail["msg"]
    if detail["type"] == "json_invalid":
        return f"the body is not JSON: {cause}, at character {detail['loc'][-1]}"
    return str(cause)


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
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, headers)


def _allowed_methods(request: Request) -> str:
    """Methods of all routes with the request's path; the router names the first one's only."""
    routes = [each for each in request.app.routes if each.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for each in routes for method in each.methods}))


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(described(error), "internal_error"), 500)
