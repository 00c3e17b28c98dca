"""`/openapi.json`: what each route answers, mistakes included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from tllm_spec.server.answer_models import Error

REASONS = {
    400: "The body has mistakes, or asks for what is not served.",
    404: "Another model is served.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The engine could not finish the request.",
    503: "The engine is down.",
    504: "The request took longer than the server allows.",
}


def answers(model: type[BaseModel], *, may_stream: bool = False) -> dict[int | str, Any]:
    """The `responses` of a route."""
    content = {"text/event-stream": {"schema": {"type": "string"}}} if may_stream else {}
    errors: dict[int | str, Any] = {
        status: {"model": Error, "description": reason} for status, reason in REASONS.items()
    }
    return {200: {"model": model, "content": content}, **errors}


def true_schema(app: FastAPI) -> None:
    """Removes FastAPI's own answer to mistakes, which is never sent."""
    make = app.openapi

    def schema() -> dict[str, Any]:
        made = make()
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        return made

    app.openapi = schema  # type: ignore[method-assign]  # as FastAPI's documentation does
