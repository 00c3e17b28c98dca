"""The examples of docs/python.md, the quick start of the README and `make chat` run as they are."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import Eagle3DecodingConfig
from tools import chat

ROOT = Path(__file__).resolve().parent.parent


def examples(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_options_file_of_the_readme_is_accepted() -> None:
    (options,) = examples("README.md", "yaml")
    args = LlmArgs.from_kwargs("/models/Llama-3.1-8B-Instruct", **yaml.safe_load(options))
    assert isinstance(args.speculative_config, Eagle3DecodingConfig)


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


def test_the_chat_script_compares_the_answers_without_and_with_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat.py", "zoo:llama", "def add(a, b):"])
    chat.main()
    out = capsys.readouterr().out
    assert "> def add(a, b):" in out and "tok/s with an acceptance length of" in out
    assert "the same text" in out
    assert out.splitlines()[-1].endswith("tllm-serve zoo:llama --config yaml_examples/ngram.yaml")
