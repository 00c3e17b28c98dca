"""Objects that a configuration names by "package.module:ClassName" and keyword arguments."""

from __future__ import annotations

from importlib import import_module
from inspect import isabstract, signature
from typing import Any


def import_path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def make_object(name: str, given: object, arguments: dict[str, Any] | None) -> Any:
    """Returns `given` itself, or an instance of the class whose import path it is.

    name: of the option, for error messages. Raises ValueError when the path leads to no class, or
    the arguments do not fit it."""
    if not isinstance(given, str):
        return given
    module_name, _, class_name = given.partition(":")
    try:
        made_by = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: of a relative path
        raise ValueError(f"{name} = {given!r} cannot be imported: {error}") from error
    if not callable(made_by):
        raise ValueError(f"{name} = {given!r} is not a class")
    if isabstract(made_by):
        missing = ", ".join(sorted(made_by.__abstractmethods__))
        raise ValueError(f"{name} = {given!r} is abstract: it does not define {missing}")
    try:
        signature(made_by).bind(**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"{name}_args = {arguments} do not fit {class_name}: {error}") from error
    return made_by(**(arguments or {}))
