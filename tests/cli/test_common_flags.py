"""Flags of every command: help texts, `--version`, `--log_level`."""

import re

import click
import pytest
from click.testing import CliRunner

from tllm_spec import __version__
from tllm_spec.cli import bench, serve
from tllm_spec.cli.version import LOG_LEVELS


@pytest.mark.parametrize("parameter", [*serve.main.params, *bench.main.params])
def test_every_visible_option_has_a_help_text(parameter: click.Parameter) -> None:
    if isinstance(parameter, click.Option):
        assert parameter.help


def test_levels_of_both_kinds_of_log_are_those_of_python() -> None:
    assert set(LOG_LEVELS.values()) == {"critical", "error", "warning", "info", "debug"}


@pytest.mark.parametrize(
    ("command", "name"), [(serve.main, "tllm-serve"), (bench.main, "tllm-bench")]
)
def test_the_version_needs_no_model(command: click.Command, name: str) -> None:
    result = CliRunner().invoke(command, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"{name} {__version__} (commit ")
    assert re.search(r"; extras: (none|\w+(, \w+)*)\)$", result.output.strip())
