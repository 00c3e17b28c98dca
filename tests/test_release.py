"""The version, and the versions with which the tests have passed."""

import re
import warnings
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tllm_spec import __version__
from tllm_spec.cli import version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy/requirements-tested.txt"


PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What follows the build of torch that a machine has.
FOLLOWS_TORCH = re.compile(r"torch|triton|nvidia-|cuda-")


def locked() -> list[Requirement]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def needed() -> list[Requirement]:
    """What setup.py asks for, its extras included."""
    return [Requirement(line) for line in requires("tllm_spec") or []]


def name_of(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def applies(requirement: Requirement, python: str) -> bool:
    """Whether pip asks for it on Linux, with the extra `dev`."""
    own = {"python_version": python, "python_full_version": f"{python}.9", "extra": "dev"}
    own |= {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(own)


def test_the_version_is_written_in_one_place() -> None:
    number = re.escape(__version__)
    places = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "tllm_spec").glob("*.py")]
    found = [path.name for path in places if re.search(rf'"{number}"', path.read_text("utf-8"))]
    assert found == ["version.py"]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_has_one_tested_version_in_its_range(python: str) -> None:
    found = [(name_of(line), str(line.specifier)) for line in locked() if applies(line, python)]
    versions = dict(found)
    assert len(versions) == len(found), "a package has two versions"
    asked = [each for each in needed() if applies(each, python)]
    assert len(asked) > 30
    for requirement in asked:
        name = name_of(requirement)
        if not FOLLOWS_TORCH.match(name):
            assert requirement.specifier.contains(versions[name].removeprefix("==")), requirement


def test_what_follows_the_machines_torch_has_a_range_and_no_tested_version() -> None:
    assert not [line for line in locked() if FOLLOWS_TORCH.match(line.name)]
    assert {name_of(each) for each in needed()} >= {"torch", "triton", "nvidia-cuda-nvrtc"}


def test_every_range_has_an_end() -> None:
    for requirement in needed():
        operators = {each.operator for each in requirement.specifier}
        assert operators & {"<", "=="}, requirement
    pythons = SpecifierSet(metadata("tllm_spec")["Requires-Python"])
    assert [f"3.{minor}" for minor in range(20) if f"3.{minor}.0" in pythons] == list(PYTHONS)


def test_installing_and_the_image_take_the_tested_versions() -> None:
    for file in ("Makefile", "deploy/Dockerfile"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "-c $(TESTED)" in text or text.count("pip install -c /src/deploy/") == 2, file


def test_both_pages_say_what_the_check_of_a_change_runs() -> None:
    targets = " ".join(re.findall(r"timed make (\w+)", (ROOT / ".ci/run").read_text("utf-8")))
    assert targets
    for page in ("AGENTS.md", "CONTRIBUTING.md"):
        assert f"`make {targets}`" in (ROOT / page).read_text(encoding="utf-8"), page


def test_a_warning_that_our_own_code_causes_is_an_error() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "llm.py", 1, module="tllm_spec.llm")


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
