"""Arguments of `LLM` as flags: under their names here or a neighbour's, dotted for nested ones.

`--max-model-len 128` and `--kv_cache_config.dtype fp8` need no declaration: the tables of
`config/neighbours.py` and the fields of `LlmArgs` say what there is. Values are written as in YAML.
`--help` shows only the flags that a command declares itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple

import click
import yaml
from click.core import ParameterSource
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tllm_spec.cli.version import Decorator, flag, option, together
from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.config_base import ConfigError, ConfigModel, option_texts
from tllm_spec.config.llm_args import LlmArgs, overlay
from tllm_spec.config.neighbours import SHORT_FLAGS
from tllm_spec.config.option_checks import absent_reason, read_value, refusals, row_of, shown
from tllm_spec.server_info import plain

# What flags without a value begin with, of those that there is nothing for here.
SWITCHES = ("enable_", "disable_", "allow_", "no_", "use_", "grpc")
SEVERAL = {"lora_modules", "lora_paths", "lora_target_modules"}  # flags that take several words
LLM_FLAGS = "llm_flags"  # what a command gets them as


class LlmFlags(NamedTuple):
    """Arguments of `LLM` as they were given, and what was given that there is nothing for."""

    arguments: dict[str, Any]
    refusals: list[str]


def read_flags(flags: dict[str, Any]) -> LlmFlags:
    """What a command line says about LLM, under the names here: the command's own flags, None or
    False where they were not given, over its `llm_flags`."""
    given = {name: each for name, each in flags.items() if each is not None and each is not False}
    others: LlmFlags = given.pop(LLM_FLAGS)
    try:
        return others._replace(arguments=LlmArgs.with_our_names(overlay(others.arguments, given)))
    except ConfigError as error:
        return LlmFlags({}, [*others.refusals, *error.lines])


class LlmCommand(click.Command):
    """A command that takes all arguments of `LLM`. It gets them as `llm_flags`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        own = {name: each for each in options for name in (*each.opts, *each.secondary_opts)}
        words, rest, flags = list(args), [], LlmFlags({}, [])
        unknown: list[str] = []
        while words:
            word = re.sub(r"^-\w+", lambda flag: SHORT_FLAGS.get(flag[0], flag[0]), words.pop(0))
            given_name, equals, text = word[2:].partition("=")
            name = either_spelling(given_name)
            if word == "--":
                rest += [word, *words]
                break
            if option := own.get(f"--{name}" if word.startswith("--") else word):
                rest.append(word)
                if not (option.is_flag or equals):  # its value may begin with a hyphen
                    rest, words = rest + words[:1], words[1:]
            elif word[:1] == "-" and word[1:2].isalpha() and word[:2] not in own:
                unknown.append(f"{word} is not a known flag")
            elif not word.startswith("--"):
                rest.append(word)
            elif _path_of(name) == "model":
                rest += [text] if equals else []
            elif (found := _find(name)) is None:
                unknown.append(f"--{name} is not a known flag{_similar(name, own)}")
            else:
                value = _value(found, words, text if equals else None)
                if name in SEVERAL:
                    value = _with_more(value, words)
                if reason := found.refused:
                    flags.refusals.append(f"--{name} is refused: {reason}; leave it out")
                else:
                    given = overlay(flags.arguments, _nested(found.name, value))
                    flags = flags._replace(arguments=given)
        if unknown:
            lines = [*unknown, *flags.refusals, *_mistakes(flags.arguments)]
            raise click.UsageError("\n".join(lines), ctx)
        rest = super().parse_args(ctx, rest)
        ctx.params[LLM_FLAGS] = flags
        return rest


class _Found(NamedTuple):
    """A flag: the option's name, its value where it is given none, and why it is refused."""

    name: str
    alone: bool | None
    refused: str | None = None


def _find(name: str) -> _Found | None:
    """None for an unknown flag."""
    head = name.partition(".")[0]
    if head in LlmArgs.model_fields or head in LlmArgs.ignored or row_of(head, LlmArgs.renamed):
        return _Found(name, True if head != name or _is_switch(name) else None)
    if name.startswith("no_") and (positive := _find(name[3:])) and positive.alone:
        return positive._replace(alone=False)
    if reason := absent_reason(name):
        return _Found(name, True if name.startswith(SWITCHES) else None, reason)
    return None


def _is_switch(name: str) -> bool:
    if name in LlmArgs.ignored:
        values = LlmArgs.ignored[name]
        return bool(values) and all(isinstance(value, bool) for value in values)
    row = row_of(name, LlmArgs.renamed)
    if row is not None and row.value(True) is not True:
        return True
    field = _field_of(name)
    takes_bool = field is not None and field.annotation is bool
    return takes_bool and not name.endswith("_config")  # a neighbour's mapping


def _field_of(name: str) -> FieldInfo | None:
    kind: Any = LlmArgs
    field = None
    for part in _path_of(name).split("."):
        field = getattr(kind, "model_fields", {}).get(part)
        kind = None if field is None else field.annotation
    return field


def _path_of(name: str) -> str:
    row = row_of(name, LlmArgs.renamed)
    return name if row is None else row.path


def _value(flag: _Found, words: list[str], text: str | None) -> object:
    """The value of a flag; it may be the first of the `words` that follow, which it then leaves."""
    nested = "." in flag.name
    if text is None and (flag.alone is None or nested) and words and not words[0].startswith("--"):
        text = words.pop(0)
    if text is None:
        if flag.alone is None:
            raise click.BadOptionUsage(flag.name, f"Option '--{flag.name}' requires an argument.")
        return flag.alone
    try:
        return read_value(text)
    except yaml.YAMLError:
        if text.startswith(("{", "[")):
            raise click.BadParameter(f"--{flag.name}: {shown(text)} is not JSON or YAML") from None
        return text


def _with_more(value: object, words: list[str]) -> object:
    """A flag's value and those of the words that follow, which it takes."""
    values = [value]
    while words and not words[0].startswith("-"):
        values.append(read_value(words.pop(0)))
    return value if len(values) == 1 else values


def _mistakes(arguments: dict[str, Any]) -> list[str]:
    """What `LLM` would refuse of them."""
    try:
        LlmArgs(**{"model": "", **arguments})
    except ConfigError as error:
        return error.lines
    return []


def _nested(path: str, value: object) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: _nested(rest, value) if rest else value}


def _similar(name: str, own: Iterable[str]) -> str:
    known = (*own, *(f"--{each}" for each in LlmArgs.model_fields))
    close = get_close_matches(f"--{name}", dict.fromkeys(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def llm_options(*flags: str) -> Decorator:
    """Arguments of `LLM` that `--help` shows, described as their fields are. flags: as `option` has
    them."""
    return together(*map(_declared, flags))


def _declared(names: str) -> Decorator:
    words = names.split()
    name = words[0].removeprefix("--") if words[-1].startswith("--") else words[-1]
    *nested, last = _path_of(name).split(".")
    owner: Any = LlmArgs
    for part in nested:
        owner = owner.model_fields[part].annotation
    field, text = owner.model_fields[last], option_texts(owner)[last].replace("`", "")
    annotation = repr(field.annotation)  # also of an option that may be null
    kinds = (each for each in (bool, int, float) if re.search(rf"\b{each.__name__}\b", annotation))
    if (kind := next(kinds, str)) is bool:
        return flag(names, text)
    default = "" if field.default is None else f" [default: {field.default}]"
    return option(names, kind, text + default)


def either_spelling(name: str) -> str:
    """For click's `token_normalize_func`: `--max-batch-size` means `--max_batch_size`."""
    return name.replace("-", "_")


def ignored_option(*flags: str, **kind: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A flag of `LlmArgs.ignored` for a command that starts no `LLM`."""

    def check(context: click.Context, option: click.Parameter, value: object) -> None:
        if refused := refusals({str(option.name): value}, LlmArgs.ignored):
            raise click.ClickException("\n".join(refused.values()))

    help = "Taken with values that ask for nothing."
    return click.option(*flags, callback=check, expose_value=False, hidden=True, help=help, **kind)


@contextmanager
def refused_together(refusals: list[str]) -> Iterator[None]:
    """Raises one ConfigError for `refusals` and for what a ConfigError inside refuses."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([*refusals, *error.lines]) from None
    if refusals:
        raise ConfigError(refusals)


# `--print_config`: every option with its value, and where it comes from.


SECRETS = frozenset({"api_key", "ssl_keyfile_password"})
SOURCES = {ParameterSource.COMMANDLINE: "command line", ParameterSource.ENVIRONMENT: "environment"}


def server_lines(context: click.Context, names: list[str]) -> Iterator[str]:
    """The command's own options."""
    for name in names:
        if name in LlmArgs.model_fields:
            continue  # the model: a YAML file may give it, so it is one of `llm_lines`
        value = context.params[name]
        source = SOURCES.get(context.get_parameter_source(name), "default")  # type: ignore[arg-type]  # None: default
        shown = "(set)" if name in SECRETS and value else value
        yield _line(name, shown, source)


def llm_lines(
    args: LlmArgs,
    flags: Mapping[str, Any],
    yaml_options: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> Iterator[str]:
    """LLM's arguments. flags: those of the command line, which has the model, too; yaml_options:
    those of the file; chosen: both, with what `AUTO` adds to them."""
    given = {"model": args.model, **flags}
    sources = [("file", yaml_options), ("command line", given), ("chosen", chosen)]
    return _lines(args, sources, indent="")


def _lines(
    model: BaseModel, sources: list[tuple[str, Mapping[str, Any]]], indent: str
) -> Iterator[str]:
    if isinstance(model, ConfigModel):
        unasked = model.with_our_names({}).items()  # what is so without being given
        named = [(source, model.with_our_names(given).items()) for source, given in sources]
        sources = [
            (source, dict(each for each in own if each not in unasked)) for source, own in named
        ]
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            inner = ((source, given.get(name)) for source, given in sources)
            nested = [(source, own if isinstance(own, Mapping) else {}) for source, own in inner]
            yield f"{indent}{name}:"
            yield from _lines(value, nested, indent + "  ")
        else:
            source = next((source for source, given in sources if name in given), "default")
            shown = value.as_options() if isinstance(value, AdaptiveConfig) else plain(value)
            yield indent + _line(name, shown, source)


def _line(name: str, value: Any, source: str) -> str:
    text = yaml.safe_dump({name: value}, default_flow_style=True, width=1 << 20).strip()
    return f"{text[1:-1]}  # {source}"
