"""The base of request bodies and of their parts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, WithJsonSchema

from tllm_spec.config.config_base import ConfigModel

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
