"""What the server logs: one format, and a line about the load."""

import json
import logging
import sys

import pytest

from tllm_spec.executor.py_executor import Load
from tllm_spec.server.child import JsonFormatter, configure_logs
from tllm_spec.server.engine_process import log_load


def test_a_json_line_has_the_fields_of_the_record_and_its_exception() -> None:
    try:
        raise KeyError("k")
    except KeyError:
        record = logging.LogRecord(
            "tllm_spec.x", logging.ERROR, "", 0, "no %s: %d", ("a\nb", 3), sys.exc_info()
        )
    record.fields = {"running": 2}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "no a\nb: 3" and entry["level"] == "error"
    assert entry["running"] == 2 and "KeyError" in entry["exception"]
    assert entry["time"].endswith("Z")


def test_a_line_of_one_of_several_processes_says_which(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    for log_format in ("text", "json"):
        logging.root.handlers.clear()
        configure_logs("info", log_format, "engine 1")
        logging.getLogger("tllm_spec.x").error("here")
    text, line = capfd.readouterr().err.splitlines()
    assert text.endswith(" ERROR engine 1 tllm_spec.x: here")
    assert json.loads(line)["part"] == "engine 1"


def test_the_load_is_what_happened_since_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tllm_spec.load")
    first, *loads = (
        Load(0, 0, None, 0, 0),
        Load(3, 4, 2, request_rounds=100, emitted_tokens=250),
        Load(3, 0, 2, request_rounds=100, emitted_tokens=250),
        Load(0, 0, 2, request_rounds=100, emitted_tokens=250),
    )
    for load, seconds in zip(loads, (2.0, 1.0, 1.0), strict=True):
        log_load(first, load, seconds)
        first = load
    assert caplog.messages == [
        "125 tokens/s, 3 running, 4 waiting, acceptance length 2.5, draft length 2",
        "0 tokens/s, 3 running, 0 waiting, acceptance length -, draft length 2",
    ]
