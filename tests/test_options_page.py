"""docs/options.md is what the code says, and every option has a description."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"
UNDESCRIBED = re.compile(r"^\| `([a-z_]+)`.*\| +\|$", re.M)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_options", DOCS / "generate_options.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    written = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written == generator.page(), "run `make docs`"


def test_every_option_of_a_configuration_is_described(generator: ModuleType) -> None:
    assert UNDESCRIBED.findall("| `some_option` | text | `null` |  |") == ["some_option"]
    assert not UNDESCRIBED.findall(generator.page())
