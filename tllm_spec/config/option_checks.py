"""Options given by name, as in a YAML file: which names are the neighbours', which are not known,
how values are shown, and which texts are no Unicode."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from inspect import isabstract, signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from tllm_spec.config.neighbours import ABSENT, Ignored, Renamed, Values

logger = logging.getLogger(__name__)

MAX_SHOWN = 200  # characters of a value in an error message
MAX_UNKNOWN = 10  # unknown options that an error message lists


def absent_reason(name: str) -> str | None:
    """Why there is no option of this name, or None."""
    words = f"_{name.replace('-', '_')}_"
    return next((reason for key, reason in ABSENT.items() if f"_{key}_" in words), None)


def row_of(name: object, renamed: Mapping[str, Renamed]) -> Renamed | None:
    """The row of a name, which may be spelled with - or _."""
    return renamed.get(name.replace("-", "_")) if isinstance(name, str) else None


def name_here(name: str, renamed: Mapping[str, Renamed]) -> str:
    row = row_of(name, renamed)
    return name if row is None else row.path


def with_our_names(options: Mapping[str, Any], renamed: Mapping[str, Renamed]) -> dict[str, Any]:
    """The options under the names here; null for a renamed one means that it is not set. Raises
    ValueError, a line for each option that two names give different values."""
    named = {name: each for name, each in options.items() if row_of(name, renamed) is None}
    rows = [(name, row) for name in options if (row := row_of(name, renamed)) is not None]
    values = {name: row.value(options[name]) for name, row in rows}
    lines: list[str] = []
    off: set[str] = set()
    for name, row in sorted(rows, key=lambda each: (values[each[0]] == {}, "." in each[1].path)):
        value = values[name]
        head, _, nested = row.path.partition(".")
        if options[name] is None or head in off:
            continue
        if value == {} != options[name]:  # on, as far as others do not say how
            named.setdefault(head, {})
            continue
        off |= {head} if value is None else set()
        place, last = named, head
        if nested:
            outer = _as_mapping(named.get(head))
            if outer is None:
                continue  # to be refused by its type
            place = named[head] = outer
            last = nested
        if place.setdefault(last, value) != value:
            lines.append(
                f"{name} = {shown(options[name])} means {row.path} = {shown(value)}, which is "
                f"given as {shown(place[last])}"
            )
    if lines:
        raise ValueError("\n".join(lines))
    return named


def _as_mapping(options: object) -> dict[str, Any] | None:
    """The options that a configuration object or mapping has; None for anything else."""
    if options is None or isinstance(options, Mapping):
        return dict(options or {})
    names = getattr(options, "model_fields_set", None)
    return None if names is None else {name: getattr(options, name) for name in names}


def refusals(options: Mapping[str, Any], ignored: Ignored) -> dict[str, str]:
    """For each of `options` in the list with a value that asks for something, the sentence that
    refuses it."""
    return {
        name: refusal(name, shown(_in_the_way(value, ignored[name])), ignored[name])
        for name, value in options.items()
        if name in ignored and not is_ignored(value, ignored[name])
    }


def _in_the_way(value: object, accepted: Values) -> object:
    """The value, and of a mapping the keys that ask for something."""
    if not isinstance(value, Mapping):
        return value
    return {key: each for key, each in value.items() if not is_ignored({key: each}, accepted)}


def refusal(name: str, value: str, accepted: Values) -> str:
    """The sentence that refuses an option of the list. value: as it is shown."""
    reason = absent_reason(name) or "it has no counterpart here"
    taken = " or ".join(dict.fromkeys(_shown_accepted(each) for each in (None, *accepted)))
    return f"{name} = {value} is refused: {reason}; accepted: {taken}"


def warn_of_ignored(options: Mapping[str, Any], ignored: Ignored) -> None:
    """Logs one line for each of `options` in the list whose value asks for something."""
    for name, value in options.items():
        if name in ignored and _asks(value):
            logger.warning("%s = %s has no effect: nothing here depends on it", name, shown(value))


def _asks(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_asks, value.values()))
    return value not in (None, False, "", "auto", "AUTO", [])


def _shown_accepted(value: object) -> str:
    """The first entry of a mapping stands for all."""
    if isinstance(value, type):
        return f"any {value.__name__}"
    if isinstance(value, frozenset):
        return " or ".join(map(repr, sorted(value)))
    if not isinstance(value, Mapping) or len(value) < 2:
        return repr(value)
    return f"{{{next(iter(value))!r}: {_shown_accepted(next(iter(value.values())))}, ...}}"


def is_ignored(value: object, accepted: Values) -> bool:
    """Whether a value is one of those that change nothing. `True` is not `1`."""
    plain = value.value if isinstance(value, Enum) else value
    return plain is None or any(_asks_for(plain, each) for each in accepted)


def _asks_for(value: object, accepted: object) -> bool:
    if isinstance(accepted, type):
        return type(value) is accepted
    if isinstance(accepted, frozenset):
        return any(_asks_for(value, each) for each in accepted)
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        return all(
            name in accepted and _asks_for(each, accepted[name]) for name, each in value.items()
        )
    return type(value) is type(accepted) and value == accepted


def unknown_options(options: Mapping[str, object], known: Iterable[str]) -> list[str]:
    """For each unknown key a sentence with its value and what may have been meant. The first that
    is like no other lists the known ones."""
    known, lines, has_list = sorted(known), [], False
    for path, value in options.items():
        name = path.rpartition(".")[2]
        sentence = f"{shown_name(path)} = {shown(value)} is not a known option"
        if close := get_close_matches(name, known, n=3):
            sentence += f"; did you mean {' or '.join(close)}?"
        elif not has_list:
            sentence += f"; known: {', '.join(known)}"
            has_list = True
        lines.append(sentence)
    return lines


def many_unknown(options: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Lines that name the first of more than MAX_UNKNOWN unknown options; no line for fewer.

    Finding similar names for thousands of keys would take seconds."""
    unknown = options.keys() - known
    if len(unknown) <= MAX_UNKNOWN:
        return []
    first = islice((name for name in options if name in unknown), MAX_UNKNOWN)
    lines = [f"{shown_name(name)} = {shown(options[name])} is not a known option" for name in first]
    return [*lines, f"... and {len(unknown) - MAX_UNKNOWN} more unknown options"]


def shown(value: object) -> str:
    """A value as error messages show it. Long values are cut."""
    text, pieces = "", _pieces(value)
    while len(text) <= MAX_SHOWN and (piece := next(pieces, None)) is not None:
        text += piece
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _pieces(value: object) -> Iterator[str]:
    """Pieces of `repr(value)`, whose whole would take long for many or for deep values."""
    if type(value) is str:
        yield repr(value[: MAX_SHOWN + 1])
    elif type(value) is dict:
        for number, (name, each) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _pieces(name)
            yield ": "
            yield from _pieces(each)
        yield "}" if value else "{}"
    elif type(value) is list:
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from _pieces(each)
        yield "]" if value else "[]"
    else:
        yield repr(value)


def shown_name(name: str) -> str:
    """An option's name as error messages show it. Long names are cut."""
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def check_text(text: str, name: str = "prompt") -> None:
    """Raises ValueError for a lone surrogate (half a character), which JSON and Python can express
    and tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise ValueError(
            f"{name}: character {error.start} is {half}, one half of a surrogate pair; Unicode "
            "text is needed"
        ) from None


# Checks of single values, each with a sentence that names the option, the value and what is
# accepted. All raise ValueError.


LARGEST = sys.float_info.max


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_adapter_name(name: object) -> None:
    if not isinstance(name, str) or ADAPTER_NAME.fullmatch(name) is None:
        raise ValueError(
            f"lora_name = {shown(name)}: 1 to 128 letters, digits and any of '._:-' are needed, "
            "the first a letter or a digit"
        )


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: True or False is needed")


def check_integer(name: str, value: object, low: int = 0, high: float = math.inf) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: an integer is needed")
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: a number is needed")
    # The second condition is for integers, which may be larger than any float.
    if not (low <= value <= high and -LARGEST <= value <= LARGEST):
        raise ValueError(f"{name} = {value} is out of range: {_range(low, high)}")


def check_list(name: str, value: object, *, or_none: bool = True) -> None:
    if or_none and value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{name} = {shown(value)}: a list of token ids is needed")


def _range(low: float, high: float) -> str:
    if math.isinf(low):
        return "a finite number is needed"
    return f"at least {low} is needed" if math.isinf(high) else f"{low} to {high} is accepted"


# Log probabilities or logits of the model itself, or of what each token was chosen from.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
PROCESSED: tuple[LogprobsMode, ...] = ("processed_logprobs", "processed_logits")
LOGITS: tuple[LogprobsMode, ...] = ("raw_logits", "processed_logits")


def check_logprobs_mode(mode: object) -> None:
    if mode not in (modes := get_args(LogprobsMode)):
        raise ValueError(f"logprobs_mode = {shown(mode)}: one of {', '.join(modes)} is needed")


# Objects that a configuration names by "package.module:ClassName" and keyword arguments.


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


# Reads a YAML file of options.


MAX_VALUES = 100_000  # in a file; those that aliases repeat count each time
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
