"""`/openapi.json`: what each route answers, mistakes included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from tllm_spec.server.answer_models import Error

REASONS = {
    400: "The body has mistakes, or asks for what is not served.",
    401: "The server needs a key.",
    403: "The Host is not localhost, where the server listens.",
    404: "Another model is served, or what is asked for is off.",
    408: "The body has not arrived in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting.",
    500: "The engine could not finish the request.",
    503: "The engine is down.",
    504: "The request took longer than the server allows.",
}


def answers(model: type[BaseModel], *, may_stream: bool = False) -> dict[int | str, Any]:
    """The `responses` of a route."""
    content: dict[str, Any] = {"text/event-stream": {}} if may_stream else {}
    return {200: {"model": model, "content": content}, **errors(*REASONS)}


def errors(*statuses: int) -> dict[int | str, Any]:
    """The `responses` of a route to mistakes and faults."""
    return {status: {"model": Error, "description": REASONS[status]} for status in statuses}


def true_schema(app: FastAPI, model: str) -> None:
    """Removes FastAPI's own answer to mistakes, which is never sent. model: its served name, which
    bodies must have."""
    make = app.openapi

    def schema() -> dict[str, Any]:
        made = make()
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = made["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for name, schema in schemas.items():
            if name.endswith("Request") and "model" in schema["properties"]:
                schema["properties"]["model"]["enum"] = [model]
        return made

    app.openapi = schema  # type: ignore[method-assign]  # as FastAPI's documentation does
