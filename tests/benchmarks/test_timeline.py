"""`benchmarks/timeline.py`: spans of a trace, the figure, and that it runs."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import timeline as script
from benchmarks.harness import engine
from benchmarks.harness.engine import PHASE
from benchmarks.harness.report import ROOT, load, main
from benchmarks.harness.spans import Event, Span, Timeline, clipped, spans_of, timeline
from benchmarks.harness.timeline_figure import draw


def note(kind: str, start: float, end: float) -> Event:
    return {"cat": "user_annotation", "name": PHASE + kind, "ts": start, "dur": end - start}


def graph(number: int, launched: float, *kernels: tuple[float, float]) -> list[Event]:
    """A graph's launch and its kernels, or a copy."""
    arguments = {"correlation": number}
    launch = {"cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1, "args": arguments}
    return [
        launch,
        *(
            {"cat": "kernel", "name": "k", "ts": start, "dur": end - start, "args": arguments}
            for start, end in kernels
        ),
    ]


def traced_round(number: int) -> list[Event]:
    """A round of 100 µs: the target's graph, then the draft's. The device begins when the host has
    left `launch`, and is idle for 2 and 3 µs."""
    start = 100.0 * number
    return [
        note("schedule", start, start + 5),
        note("launch", start + 5, start + 20),
        note("draft", start + 12, start + 18),
        note("read", start + 20, start + 99),
        note("wait", start + 21, start + 90),
        *graph(2 * number, start + 8, (start + 25, start + 40), (start + 41, start + 80)),
        *graph(2 * number + 1, start + 14, (start + 82, start + 122)),
    ]


def test_a_graph_is_one_span_and_is_named_by_where_it_was_launched() -> None:
    spans = spans_of([event for number in range(2) for event in traced_round(number)])
    device = [span for span in spans if not span.is_host]
    assert device == [
        Span("target", 25, 80),
        Span("idle", 80, 82),
        Span("draft", 82, 122),
        Span("idle", 122, 125),
        Span("target", 125, 180),
        Span("idle", 180, 182),
        Span("draft", 182, 222),
    ]
    host = [span.kind for span in spans if span.is_host]
    assert host == 2 * ["schedule", "launch", "read", "wait"]


def test_a_timeline_has_medians_of_all_rounds_and_the_spans_of_a_few() -> None:
    found = timeline("a path", [e for n in range(6) for e in traced_round(n)], 2, 2)
    assert (found.round_us, found.idle_us) == (100, 5)
    assert found.spans[0] == Span("draft", 0, 22) and max(s.end for s in found.spans) == 200
    assert sum(span.kind == "schedule" for span in found.spans) == 2


def test_a_cpu_is_its_own_device_and_drafts_inside_its_launch_are_apart() -> None:
    def op(start: float, end: float) -> Event:
        return {"cat": "cpu_op", "name": "op", "ts": start, "dur": end - start, "args": {}}

    notes = [note("schedule", 0, 5), note("launch", 10, 60), note("draft", 30, 50)]
    ops = [op(1, 4), op(11, 20), op(22, 29), op(31, 49), op(55, 58)]
    device = [span for span in spans_of(notes + ops) if not span.is_host]
    assert device == [Span("target", 11, 31), Span("draft", 31, 49), Span("target", 49, 58)]


def test_spans_outside_an_interval_are_left_out_and_others_cut() -> None:
    spans = [Span("read", 0, 10), Span("launch", 8, 30), Span("wait", 30, 40)]
    assert clipped(spans, 10, 30) == [Span("launch", 0, 20)]


def test_the_figure_has_two_lanes_a_path_and_nothing_from_elsewhere() -> None:
    host, device = Span("launch", 0, 400), Span("target", 100, 1000)
    text = draw([Timeline(name, 900.0, 12.0, (host, device)) for name in ("one <model>", "two")])
    root, names = ElementTree.fromstring(text), {"": "http://www.w3.org/2000/svg"}
    bars = root.findall("rect[title]", names)
    assert len({bar.get("y") for bar in bars}) == len(bars) == 4
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[1] / widths[0] == pytest.approx(900 / 400, rel=1e-3)
    texts = [each.text for each in root.findall("text", names)]
    assert "one <model>: round 0.90 ms, device idle 12 µs" in texts and "1 ms" in texts
    assert text.count("http") == 1 and "url(" not in text and "prefers-color-scheme:dark" in text


def test_the_documented_figure_and_its_sentence_are_the_recorded_trace() -> None:
    recorded = load("timeline")["timeline"]
    assert recorded["about"]["device"] == "NVIDIA H200"
    rows = [
        row | {"spans": tuple(Span(**span) for span in row["spans"])} for row in recorded["rows"]
    ]
    figure, page = ROOT / "docs/images/round-timeline.svg", ROOT / "docs/kernels.md"
    assert draw([Timeline(**row) for row in rows]) == figure.read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    sentence = text.partition("One H200, 8B shape, batch 1")[2].partition("\n\n")[0]
    found = [float(value) for value in re.findall(r"([\d.]+) (?:ms|µs)", sentence)]
    expected = [(round(row["round_us"] / 1e3, 2), round(row["idle_us"])) for row in rows]
    assert found == [value for pair in expected for value in pair]


def test_the_script_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(script, "NUM_ROUNDS", 8)
    monkeypatch.setattr(script, "FIRST_DRAWN", 3)
    result, figure = tmp_path / "result.json", tmp_path / "figure.svg"
    options = ["--device", "cpu", "--output", str(result), "--figure", str(figure)]
    assert main(script.SUBJECTS, None, options, batch_size=1, figure=None) == 0
    rows = json.loads(result.read_text(encoding="utf-8"))["timeline"]["rows"]
    assert [row["path"] for row in rows] == [
        "EAGLE-3, one-model",
        "EAGLE-3, two-model",
        "Draft/Target, two-model",
    ]
    for row in rows:
        kinds = {span["kind"] for span in row["spans"]}
        assert kinds == {"schedule", "launch", "read", "wait", "target", "draft", "idle"}
        assert 0 < row["idle_us"] < row["round_us"]
    ElementTree.fromstring(figure.read_text(encoding="utf-8"))
