"""What `--version` prints: the package's version, its commit, and which extras are installed."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tllm_spec import __version__

PACKAGE = Path(__file__).parents[1]
# `pyzmq>=25; extra == "events"`, as packages' metadata has it.
REQUIREMENT = re.compile(r"([\w.-]+)[^;]*;.*extra == ['\"](\w+)['\"]")


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
