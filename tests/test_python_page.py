"""The examples of docs/python.md and the quick start of the README run as they are."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def examples(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_of_a_page_run_in_their_order_and_print_something(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examples(page)
    assert found
    names: dict[str, Any] = {"__name__": "examples"}
    for example in found:
        exec(compile(example, page, "exec"), names)
        assert capsys.readouterr().out.strip()
