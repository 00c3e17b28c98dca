"""The base of all configuration models: unknown keys refused, no silent conversion, frozen,
readable errors.

It does not know any option; see `tllm_spec.config` and `tllm_spec.speculative_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tllm_spec.option_checks import (
    NotServed,
    many_unknown,
    refuse_not_served,
    shown,
    unknown_option,
)


class ConfigError(ValueError):
    """All mistakes found in one configuration, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class ConfigModel(BaseModel):
    """A configuration object; every mistake in its arguments is a ValueError that names key and
    value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    not_served: ClassVar[Mapping[str, NotServed]] = {}

    def __init__(self, /, **options: Any) -> None:
        if lines := many_unknown(options, {*type(self).model_fields, *self.not_served}):
            raise ConfigError(lines)
        try:
            refuse_not_served(options, self.not_served)
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        without_effect = self.not_served.keys() - type(self).model_fields
        try:
            super().__init__(
                **{name: value for name, value in options.items() if name not in without_effect}
            )
        except ValidationError as error:
            raise ConfigError(_sentences(error, type(self))) from None


def _sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One or more readable lines for each error that pydantic found in `model`'s arguments."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        path = ".".join(str(part) for part in detail["loc"])
        given, cause = shown(detail["input"]), detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a nested configuration has named its own keys
            lines += [f"{path}.{line}" if path else line for line in cause.lines]
        elif isinstance(
            cause, ValueError
        ):  # from a validator of ours; without a path it names its keys itself
            lines.append(f"{path} = {given}: {cause}" if path else str(cause))
        elif detail["type"] == "extra_forbidden":
            lines.append(unknown_option(path, detail["input"], model.model_fields))
        elif detail["type"] == "missing":
            lines.append(f"{path} is required by {model.__name__}")
        else:
            lines.append(f"{path} = {given}: {detail['msg'][0].lower()}{detail['msg'][1:]}")
    return lines
