"""`--print_config`: every option with its value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
import yaml
from click.core import ParameterSource
from pydantic import BaseModel

from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.server_info import plain

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
    args: LlmArgs, flags: Mapping[str, Any], yaml_options: Mapping[str, Any]
) -> Iterator[str]:
    """LLM's arguments. flags: those of the command line, which has the model, too; yaml_options:
    those of the file."""
    given = {"model": args.model, **flags}
    return _lines(args, [("file", yaml_options), ("command line", given)], indent="")


def _lines(
    model: BaseModel, sources: list[tuple[str, Mapping[str, Any]]], indent: str
) -> Iterator[str]:
    if isinstance(model, ConfigModel):
        sources = [(source, model.with_our_names(given)) for source, given in sources]
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            nested = [(source, _mapping(given.get(name))) for source, given in sources]
            yield f"{indent}{name}:"
            yield from _lines(value, nested, indent + "  ")
        else:
            source = next((source for source, given in sources if name in given), "default")
            yield indent + _line(name, plain(value), source)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _line(name: str, value: Any, source: str) -> str:
    text = yaml.safe_dump({name: value}, default_flow_style=True, width=1 << 20).strip()
    return f"{text[1:-1]}  # {source}"
