"""Objects that a configuration names by "package.module:ClassName" and keyword arguments."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from inspect import isabstract, signature
from pathlib import Path
from typing import Any


def import_path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def import_also_from(path: str | os.PathLike[str]) -> None:
    """Makes modules next to the file `path` importable, also in processes that this one starts.
    They hide no module of Python's or of a package."""
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def make_object(name: str, given: object, arguments: dict[str, Any] | None) -> Any:
    """Returns `given` itself, or an instance of the class whose import path it is. Raises
    ValueError as `find_class` does."""
    if not isinstance(given, str):
        return given
    return find_class(name, given, arguments)(**(arguments or {}))


def find_class(name: str, given: str, arguments: dict[str, Any] | None) -> Any:
    """The class with the import path `given`.

    name: of the option, for error messages. Raises ValueError when the path leads to no class, or
    the arguments do not fit it."""
    module_name, _, class_name = given.partition(":")
    try:
        made_by = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: of a relative path
        advice = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            advice = "; put it next to the YAML file, or its folder into PYTHONPATH"
        raise ValueError(f"{name} = {given!r} cannot be imported: {error}{advice}") from error
    if not callable(made_by):
        raise ValueError(f"{name} = {given!r} is not a class")
    if isabstract(made_by):
        missing = ", ".join(sorted(made_by.__abstractmethods__))
        raise ValueError(f"{name} = {given!r} is abstract: it does not define {missing}")
    try:
        signature(made_by).bind(**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"{name}_args = {arguments} do not fit {class_name}: {error}") from error
    return made_by
