"""Writes `deploy/requirements-tested.txt`: the versions with which the tests have passed, of all
packages that tllm_spec and its extras need (`make lock`)."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "deploy/requirements-tested.txt"
HEADER = """\
# Versions with which the tests have passed, on a CPU: one line a package, so that tools for bills
# of materials can read it. Written by `make lock`.
#   pip install -c deploy/requirements-tested.txt '.[guided]'
"""


def requirements(name: str, *, extras: bool) -> set[str]:
    """The packages that one needs, those of its extras included if asked for."""
    found = set()
    for line in distribution(name).requires or []:
        requirement, _, marker = line.partition(";")
        if extras or "extra ==" not in marker:
            found.add(normal(re.split(r"[\s<>=!~\[(]", requirement, maxsplit=1)[0]))
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions() -> dict[str, str]:
    """The versions of all installed packages that tllm_spec needs, without a build's name."""
    found: dict[str, str] = {}
    pending = requirements("tllm_spec", extras=True)
    while pending:
        name = pending.pop()
        try:
            version = distribution(name).version
        except PackageNotFoundError:  # of another platform, or an extra that tests do without
            continue
        found[name] = version.partition("+")[0]
        pending |= requirements(name, extras=False) - found.keys()
    return found


if __name__ == "__main__":
    lines = [f"{name}=={version}\n" for name, version in sorted(versions().items())]
    PATH.write_text(HEADER + "".join(lines), encoding="utf-8")
