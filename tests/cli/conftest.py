"""Fixtures for the benchmark commands: an engine whose tokens and times are known, and a data
set."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.fake_llm import FakeLLM


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `tllm_spec.llm.LLM`."""
    module: Any = ModuleType("tllm_spec.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "tllm_spec.llm", module)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "calls", [])


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Four requests of 3 prompt tokens and 6 output tokens."""
    path = tmp_path / "data.jsonl"
    lines = [{"task_id": task, "input_ids": [1, 2, 3], "output_tokens": 6} for task in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
