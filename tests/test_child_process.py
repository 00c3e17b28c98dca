"""A process with limits is started again after it has ended, in whatever way."""

from pathlib import Path

import pytest

from tllm_spec import child_process
from tllm_spec.child_process import ChildProcess

# A message says what it does: "close" ends its answers, as at the beginning of a process' end.
CODE = """
import os, sys, time
from tllm_spec.child_messages import read_message, write_message
while True:
    message = read_message(sys.stdin.buffer)
    if message in ("close", "hang"):
        if message == "close":
            os.close(1)
        time.sleep(600)
    write_message(sys.stdout.buffer, message)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "obedient_child.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "obedient_child"


def test_the_next_question_after_an_end_is_answered(module: str) -> None:
    process = ChildProcess(module, "ready")
    assert process.ask("close", 300) is None
    assert process.ask("a", 300) == "a"
    process._end()


def test_a_process_that_does_not_start_in_time_is_ended(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MAX_START_SECONDS", 0.0)
    process = ChildProcess(module, "hang")
    with pytest.raises(RuntimeError, match="did not start"):
        process.ask("a", 300)
    assert process._child is not None and process._child.poll() is not None
