"""Reads a YAML file of options."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml


class _UniqueKeysLoader(yaml.SafeLoader):
    """PyYAML takes the last of equal keys; this one refuses them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        number = Counter((key.tag, key.value) for key in keys)
        for key in keys:
            if number[key.tag, key.value] > 1:
                message = f"it has the key {key.value!r} twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError for a file that is missing, broken or has no
    mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.load(text, _UniqueKeysLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the options file {os.fspath(path)}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ValueError(f"the options file {os.fspath(path)} must hold a mapping of option names")
    return tree
