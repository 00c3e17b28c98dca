"""Bars and lines of long work."""

import logging
import sys

import pytest

from tllm_spec.progress import LogLines, progress


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    caplog.set_level(logging.INFO, "tllm_spec.progress")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    return caplog.messages


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text.split(" [")[0] for text in caplog.messages]


@pytest.mark.usefixtures("lines")
def test_without_a_terminal_each_part_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with progress("start", 3) as bar:
        for part in ("weights", "memory", "round times"):
            bar.begin(part)
    assert messages(caplog) == [
        "start, weights: 0/3",
        "start, memory: 1/3",
        "start, round times: 2/3",
    ]


@pytest.mark.usefixtures("lines")
def test_a_line_has_times_once_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("start: 0/3 [00:00<?]\n", "run: 1/3 [00:02<00:04]\n"):
        LogLines().write(text)
    assert caplog.messages == ["start: 0/3", "run: 1/3 [00:02<00:04]"]


@pytest.mark.usefixtures("lines")
def test_amounts_have_one_line_and_further_ones_after_some_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for every in (float("inf"), 0.0):
        with progress("run", 2, "requests", every=every) as bar:
            bar.advance(note="5 tokens/s")
            bar.advance()
    assert messages(caplog) == [
        "run: 0/2 requests",
        *("run: 0/2 requests", "run: 1/2 requests", "run: 2/2 requests"),
    ]
    assert "5 tokens/s" in caplog.messages[2]


@pytest.mark.usefixtures("lines")
def test_parts_of_an_amount_and_what_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with progress("compare", 4, "requests", has_parts=True) as bar:
        for name in ("plain", "ngram"):
            bar.begin(name)
            bar.advance(2)
    with progress("hidden", 1, "requests", is_shown=False) as bar:
        bar.advance()
    assert messages(caplog) == ["compare, plain: 0/4 requests", "compare, ngram: 2/4 requests"]


def test_a_terminal_has_a_bar_and_no_line(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("start", 2) as bar:
        bar.begin("weights")
    assert "start, weights:   0%|" in capsys.readouterr().err and not caplog.messages
