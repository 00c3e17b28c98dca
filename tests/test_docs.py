"""The documents: links lead somewhere, named files exist, lines and pages stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MAX_COLUMNS = 100
MAX_LINES = {"README.md": 150, "architecture.md": 120, "performance.md": 400, "adaptive.md": 120}
SOURCES = ("tllm_spec", "executor", "kernels")
FOLDERS = (
    "tllm_spec/",
    "executor/",
    "kernels/",
    "benchmarks/",
    "tests/",
    "docs/",
    "yaml_examples/",
    "tools/",
)


def name_of(path: Path) -> str:
    return path.name


def anchors(document: Path) -> set[str]:
    """Those of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_to_files_and_headings(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8"))
    targets = [(document.parent / path if path else document, anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [each for each in targets if each[1] and each[1] not in anchors(each[0])] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_files_exist(document: Path) -> None:
    quoted = re.findall(r"`([\w/.]+)`", document.read_text(encoding="utf-8"))
    paths = [path for path in quoted if path.startswith(FOLDERS)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_lines_are_short_except_in_tables(document: Path) -> None:
    lines = document.read_text(encoding="utf-8").splitlines()
    long = [
        number
        for number, line in enumerate(lines, start=1)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "`python -m" not in line
    ]
    assert long == []


@pytest.mark.parametrize("name", MAX_LINES)
def test_pages_are_short(name: str) -> None:
    (document,) = [path for path in DOCUMENTS if path.name == name]
    assert len(document.read_text(encoding="utf-8").splitlines()) <= MAX_LINES[name]


def test_the_readme_names_every_example_in_its_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {path.stem for path in (ROOT / "yaml_examples").glob("*.yaml")} <= named


def extras() -> set[str]:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    block = setup[setup.index("extras_require") :].partition("}")[0]
    return set(re.findall(r'^ +"(\w+)":', block, re.MULTILINE))


def test_the_readme_lists_every_extra_but_dev() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"'\.\[([\w,]+)\]'", readme)
    assert {extra for each in listed for extra in each.split(",")} == extras() - {"dev"}


def test_every_extra_that_a_refusal_names_can_be_installed() -> None:
    sources = [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    named = {extra for text in texts for extra in re.findall(r"tllm_spec\[(\w+)\]", text)}
    assert {"tensorrt", "onnxruntime"} <= named <= extras()
