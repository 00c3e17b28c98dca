"""How flags are declared, and those of every command: `--version`, which prints the package's
version, its commit and the extras that are installed, and `--log_level`."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click

from tllm_spec.version import __version__

PACKAGE = Path(__file__).parents[1]
# `pyzmq>=25; extra == "events"`, as packages' metadata has it.
REQUIREMENT = re.compile(r"([\w.-]+)[^;]*;.*extra == ['\"](\w+)['\"]")

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

# Python's level for each of TensorRT-LLM's names and for Python's own.
LOG_LEVELS = {
    "internal_error": "critical",
    "critical": "critical",
    "error": "error",
    "warning": "warning",
    "info": "info",
    "verbose": "debug",
    "debug": "debug",
    "trace": "debug",
}


def option(names: str, kind: Any, text: str, **more: Any) -> Decorator:
    """click's, with the flag's names, and that of the argument if it has another one, in one
    text."""
    return click.option(*names.split(), type=kind, help=text, **more)


def flag(names: str, text: str) -> Decorator:
    """An option without a value."""
    return click.option(*names.split(), is_flag=True, help=text)


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator; `--help` shows them in this order."""
    return lambda command: reduce(
        lambda wrapped, decorator: decorator(wrapped), reversed(decorators), command
    )


def log_level_option(default: str) -> Decorator:
    """`--log_level`; its value is one of Python's levels in lower case."""
    return click.option(
        "--log_level",
        type=click.Choice(list(LOG_LEVELS)),
        default=default,
        callback=lambda context, option, value: LOG_LEVELS[value],
        help="The least severe messages to log. verbose and trace mean debug.",
    )


def version_option(command: str) -> Decorator:
    """`--version` of a command."""

    def show(context: click.Context, option: click.Parameter, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            click.echo(version_line(command))
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version, the commit and the installed extras, and exit.",
    )


def version_line(command: str) -> str:
    names = ", ".join(installed_extras()) or "none"
    return f"{command} {__version__} (commit {commit()}; extras: {names})"


def commit() -> str:
    """A package has it in a file, a working tree in git."""
    if (file := PACKAGE / "commit.txt").is_file():
        return file.read_text(encoding="utf-8").strip()
    if (PACKAGE.parent / ".git").exists():
        command = ["git", "-C", str(PACKAGE), "rev-parse", "--short=12", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:
            return "unknown"
    return "unknown"


def installed_extras() -> list[str]:
    """Those of which every package is installed, whatever its version."""
    try:
        requirements = distribution("tllm_spec").requires or []
    except PackageNotFoundError:
        return []
    packages = defaultdict[str, list[str]](list)
    for found in map(REQUIREMENT.match, requirements):
        if found is not None and found[2] != "dev":
            packages[found[2]].append(found[1])
    return sorted(extra for extra, names in packages.items() if all(map(_is_installed, names)))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
