"""The base of all configuration models: frozen, no unknown keys, no silent conversion, and all
mistakes of a configuration in one readable error."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from tllm_spec.config.neighbours import Ignored, Renamed
from tllm_spec.config.option_checks import (
    absent_reason,
    many_unknown,
    refusals,
    row_of,
    shown,
    unknown_options,
    warn_of_ignored,
    with_our_names,
)

PathText = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]
PACKAGE = f"{__name__.partition('.')[0]}."
# Options whose keys are batch sizes.
NUMBERED = frozenset({"adaptive", "draft_len_schedule"})


Check = TypeVar("Check", bound=Callable[[Any], Iterable[str]])


def check(method: Check) -> Check:
    """Marks a method of a `ConfigModel` that returns what is wrong with options that are right one
    by one: the lines of a `ConfigError`. All such methods are called, so that one error has all
    mistakes."""
    method.is_check = True  # type: ignore[attr-defined]  # a mark, not an attribute of callables
    return method


class ConfigError(ValueError):
    """All mistakes found in one configuration, one line each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@cache
def option_texts(kind: type) -> dict[str, str]:
    """The strings that follow the fields of a class and of its bases, each in one line. Pydantic's
    `use_attribute_docstrings` would read the sources whenever a process imports the classes."""
    found = dict[str, str]()
    for base in reversed([each for each in kind.__mro__ if each.__module__.startswith(PACKAGE)]):
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in pairwise(tree.body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = ast.literal_eval(after.value)
                found[ast.unparse(node.target)] = " ".join(text.split())
    return found


class ConfigModel(BaseModel):
    """A configuration object. Its constructor raises ConfigError, which names key and value of
    every mistake.

    The text after a field describes the option (`option_texts`). `docs/options.md` is generated
    from these texts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    renamed: ClassVar[Mapping[str, Renamed]] = {}  # the neighbours' names of options
    ignored: ClassVar[Ignored] = {}  # the neighbours' options without effect
    null_is_default: ClassVar[frozenset[str]] = frozenset()  # options whose null is their default
    is_public: ClassVar[bool] = True  # whether users know the name of the class

    def __init__(self, /, **options: Any) -> None:
        options = self.with_our_names(options)
        if lines := many_unknown(options, {*type(self).model_fields, *self.ignored}):
            raise ConfigError(lines)
        nulls = {name for name in self.null_is_default if options.get(name, "") is None}
        options = {name: each for name, each in options.items() if name not in nulls}
        own = {name: each for name, each in options.items() if name in type(self).model_fields}
        others = {name: each for name, each in options.items() if name not in own}
        lines = list(refusals(others, self.ignored).values())
        unknown = {name: each for name, each in others.items() if name not in self.ignored}
        try:
            super().__init__(**own, **unknown)
        except ValidationError as error:
            lines += _sentences(error, type(self))
        if lines:
            raise ConfigError(lines)
        if self.is_public:
            warn_of_ignored(others, self.ignored)

    @classmethod
    def with_our_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options without the neighbours' names. Raises ConfigError when two names of one
        option have different values."""
        try:
            return with_our_names(options, cls.renamed)
        except ValueError as error:
            raise ConfigError(str(error).splitlines()) from None

    @model_validator(mode="after")
    def _run_checks(self) -> ConfigModel:
        names = _checks_of(type(self))
        if lines := [line for name in names for line in getattr(self, name)()]:
            raise ConfigError(lines)
        return self

    def as_options(self) -> dict[str, Any]:
        """Plain values whose constructor makes an equal object, in another process too. Raises
        TypeError for a value that is an object of the user's."""
        return {name: plain(getattr(self, name)) for name in sorted(self.model_fields_set)}


@cache
def _checks_of(model: type[ConfigModel]) -> tuple[str, ...]:
    """The names of the methods marked by `check`, those of base classes first."""
    attributes = [item for kind in reversed(model.__mro__) for item in vars(kind).items()]
    names = (name for name, value in attributes if getattr(value, "is_check", False))
    return tuple(dict.fromkeys(names))


def check_keys(options: Mapping[str, Any], path: str = "") -> None:
    """Raises ConfigError for a nested key that is not a string, as YAML and Python can write."""
    for name, value in options.items():
        if not isinstance(value, Mapping) or name in NUMBERED:
            continue
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(
                [f"{path}{name} has the key {shown(wrong[0])}; names of options are needed"]
            )
        check_keys(value, f"{path}{name}.")


def plain(value: Any) -> Any:
    """As YAML and JSON have it. Raises TypeError for an object that has no such form."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if hasattr(value, "as_options"):
        return value.as_options()
    raise TypeError(f"{type(value).__name__} has no plain form")


def _sentences(error: ValidationError, model: type[ConfigModel]) -> list[str]:
    """One or more readable lines for each error that pydantic found in `model`'s arguments."""
    lines: list[str] = []
    unknown: dict[str, object] = {}
    for detail in error.errors(include_url=False):
        path = ".".join(str(part) for part in detail["loc"])
        given, cause = shown(detail["input"]), detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a nested configuration has named its own keys
            lines += [f"{path}.{line}" if path else line for line in cause.lines]
        elif isinstance(cause, ValueError):  # from one of our validators
            lines.append(f"{path} = {given}: {cause}" if path else str(cause))
        elif detail["type"] == "extra_forbidden":
            if reason := absent_reason(path):
                lines.append(f"{path} = {given} is refused: {reason}")
            elif owners := " and ".join(_owners(model, path)):
                lines.append(f"{path} = {given} is not a known option here; it is one of {owners}")
            else:
                unknown[path] = detail["input"]
        elif detail["type"] == "missing":
            owner = f" by {model.__name__}" if model.is_public else ""
            lines.append(f"{path} is required{owner}")
        elif detail["type"] in ("model_type", "dict_type"):
            kind = "a mapping" if model.is_public else "an object"  # as YAML and JSON call it
            lines.append(f"{path} = {given}: {kind} is needed")
        else:
            said = detail["msg"].replace("Input should", "must", 1)
            lines.append(f"{path} = {given}: {said[0].lower()}{said[1:]}")
    return lines + unknown_options(unknown, model.model_fields)


def _owners(model: type[BaseModel], name: str) -> list[str]:
    """The options of `model` whose mapping has the option `name`."""
    return [
        option
        for option, field in model.model_fields.items()
        if any(
            name in kind.model_fields or row_of(name, kind.renamed)
            for kind in _models_in(field.annotation)
        )
    ]


def _models_in(annotation: Any) -> Iterator[type[ConfigModel]]:
    """The configuration models of an annotation, with their subclasses."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
        for kind in annotation.__subclasses__():
            yield from _models_in(kind)
    for part in get_args(annotation):
        yield from _models_in(part)
