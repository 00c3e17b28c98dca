"""The version, and the versions with which the tests have passed."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tllm_spec import __version__
from tllm_spec.cli import version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy/requirements-tested.txt"


def locked() -> dict[str, str]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_version_is_written_in_one_place() -> None:
    number = re.escape(__version__)
    places = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "tllm_spec").glob("*.py")]
    found = [path.name for path in places if re.search(rf'"{number}"', path.read_text("utf-8"))]
    assert found == ["__init__.py"]


def test_the_tested_versions_are_those_that_the_package_asks_for() -> None:
    versions = locked()
    needed = [Requirement(line) for line in requires("tllm_spec") or []]
    assert len(needed) > 10
    for requirement in needed:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert requirement.specifier.contains(versions[name]), requirement


def test_the_commit_of_a_package_is_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "PACKAGE", tmp_path)
    assert version.commit() == "unknown"
    (tmp_path / "commit.txt").write_text("abc123\n")
    assert version.version_line("tllm-serve").startswith(
        f"tllm-serve {__version__} (commit abc123; extras: "
    )


def test_an_extra_is_named_if_all_its_packages_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Distribution:
        requires = (
            "pytest>=8; extra == 'events'",
            'pytest; extra == "half"',
            'no-such-package>=1; platform_system == "Linux" and extra == "half"',
            "pytest; extra == 'dev'",
            "torch>=2",
        )

    monkeypatch.setattr(
        version, "distribution", lambda name: Distribution if name == "tllm_spec" else real(name)
    )
    assert version.installed_extras() == ["events"]


real = version.distribution
