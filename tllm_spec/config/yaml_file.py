"""Reads a YAML file of options."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MAX_VALUES = 100_000  # in a file, those behind aliases counted each time
MAX_DEPTH = 100


class _OptionsLoader(yaml.SafeLoader):
    """PyYAML takes the last of equal keys; this one refuses them. It reads numbers as YAML 1.2
    does: 010 and 1:30 are no numbers, and 1e-5 is one. Dates are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        number = Counter((key.tag, key.value) for key in keys)
        for key in keys:
            if number[key.tag, key.value] > 1:
                message = f"it has the key {key.value!r} twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


for _tag, _pattern in {
    "int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-f]+)$",
    "float": r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+|\.inf)$|\.nan$",
}.items():
    _OptionsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern, re.IGNORECASE), list("-+.0123456789")
    )


def read_value(text: str) -> Any:
    """The value that a text stands for in YAML. Raises yaml.YAMLError."""
    return yaml.load(text, _OptionsLoader)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError for a file that is missing, broken or too
    large, or has no mapping."""
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), _OptionsLoader)
        _check_size(tree)
    except RecursionError:
        raise _unreadable(path, f"it is nested more than {MAX_DEPTH} levels deep") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(path, str(error)) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"the options file {os.fspath(path)} must hold a mapping of option names")
    return tree


def _unreadable(path: str | os.PathLike[str], reason: str) -> ValueError:
    return ValueError(f"cannot read the options file {os.fspath(path)}: {reason}")


def _check_size(tree: object) -> None:
    """Raises ValueError for more values than options can have: a few aliases can stand for
    billions. A value that holds itself has no end."""
    if _count(tree, {}, MAX_DEPTH) > MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {MAX_VALUES} values")


def _count(value: object, counted: dict[int, int], depth: int) -> int:
    """The values in `value`, itself included. `counted`: of containers, by their id."""
    if not isinstance(value, (dict, list)):
        return 1
    if not depth:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or a value holds itself")
    if id(value) not in counted:
        parts = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count(part, counted, depth - 1) for part in parts)
    return counted[id(value)]
