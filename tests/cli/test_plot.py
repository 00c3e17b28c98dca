"""The picture of throughput against latency: axes, curves, points and the file's format."""

import json
import struct
import sys
from pathlib import Path

import pytest

from tests.cli.bench_command import ngram, run
from tllm_spec.bench.plot import (
    STYLES,
    LoadPoint,
    check_format,
    comparison_curves,
    draw,
    image,
    serve_curve,
)

TITLE = "zoo:llama, 2026-01-02"
PLAIN = [
    LoadPoint("1", 100, {"tpot_ms": 10, "ttft_ms": 50, "e2el_ms": 500}),
    LoadPoint("8", 600, {"tpot_ms": 13, "ttft_ms": 90, "e2el_ms": 700}),
]
EAGLE = [
    LoadPoint("1", 200, {"tpot_ms": 5, "ttft_ms": 60, "e2el_ms": 300}),
    LoadPoint("8", 700, {"tpot_ms": 0, "ttft_ms": 95, "e2el_ms": 600}),
]


def test_a_panel_for_each_latency_has_a_curve_for_each_configuration() -> None:
    figure = draw({"plain": PLAIN, "eagle": EAGLE}, TITLE)
    left, right = figure.axes
    assert figure.get_suptitle() == TITLE
    assert left.get_ylabel() == "throughput (output tokens/s)"
    assert left.get_xlabel() == "time per output token, p50 (ms)"
    assert right.get_xlabel() == "time to first token, p50 (ms)"
    points = [[line.get_xydata().tolist() for line in panel.get_lines()] for panel in (left, right)]
    assert points[0] == [[[10, 100], [13, 600]], [[5, 200]]], "0 ms: no request has that time"
    assert points[1] == [[[50, 100], [90, 600]], [[60, 200], [95, 700]]]
    assert [text.get_text() for text in left.texts] == ["1", "8", "1"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "eagle"]


def test_labels_lie_within_their_panel_and_lines_behind_them() -> None:
    figure = draw({"plain": PLAIN, "eagle": EAGLE}, TITLE)
    image(figure, ".png")  # places everything
    for panel in figure.axes:
        box = panel.get_window_extent()
        for label in panel.texts:
            x, y = zip(*label.get_window_extent().get_points(), strict=True)
            assert box.x0 < min(x) and max(x) < box.x1 and box.y0 < min(y) and max(y) < box.y1
            assert label.get_bbox_patch() is not None


def test_axes_begin_at_0_and_hold_every_point() -> None:
    for panel in draw({"plain": PLAIN, "eagle": EAGLE}, TITLE).axes:
        (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
        assert left == bottom == 0 and top > 700
        assert right > max(x for line in panel.get_lines() for x in line.get_xdata())


def test_without_streamed_requests_the_whole_latency_is_drawn() -> None:
    (panel,) = draw({"plain": [LoadPoint("1", 100, {"e2el_ms": 500})]}, TITLE).axes
    assert panel.get_xlabel() == "request latency, p50 (ms)"
    (line,) = panel.get_lines()
    assert line.get_xydata().tolist() == [[500, 100]]


def test_curves_differ_without_colours() -> None:
    number = len(STYLES["marker"])
    panel = draw({str(name): PLAIN for name in range(number)}, TITLE).axes[0]
    assert len({line.get_marker() for line in panel.get_lines()}) == number


def test_a_load_without_an_answer_has_no_point() -> None:
    (panel,) = draw(
        {"down": [LoadPoint("1", 0, {"tpot_ms": 0, "ttft_ms": 0, "e2el_ms": 0})]}, TITLE
    ).axes
    (line,) = panel.get_lines()
    assert len(line.get_xydata()) == 0


def test_a_servers_loads_become_points_with_short_names() -> None:
    figures = {"output_throughput_tok_s": 7.0, "itl_ms": {"p50": 4.0}}
    figures |= {"ttft_ms": {"p50": 1.0}, "tpot_ms": {"p50": 2.0}, "e2el_ms": {"p50": 3.0}}
    curve = serve_curve([{"load": name, **figures} for name in ("concurrency 8", "2.5 requests/s")])
    latencies = {"tpot_ms": 2.0, "ttft_ms": 1.0, "e2el_ms": 3.0}
    assert curve == [LoadPoint("8", 7.0, latencies), LoadPoint("2.5/s", 7.0, latencies)]


@pytest.mark.parametrize(
    ("suffix", "head"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_the_suffix_decides_the_format(suffix: str, head: bytes) -> None:
    check_format(Path(f"x{suffix}"))
    content = image(draw({"plain": PLAIN}, TITLE), suffix)
    assert content.startswith(head)
    if suffix == ".png":
        width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk
        assert 1000 <= width <= 2000 and 400 <= height <= 1000


@pytest.mark.usefixtures("fake_llm")
def test_compare_draws_its_sweep(dataset: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    options = ("--dataset", dataset, "--concurrency", "1,2,-1", "--streaming", "--plot", plot)
    result = run("compare", ngram(tmp_path, "first"), ngram(tmp_path, "second"), *options)
    assert result.exit_code == 0, result.output
    assert "in every run at each concurrency" in result.output and "TPOT p50" in result.output
    drawn = plot.read_text()
    for text in ("first", "second", "no limit", "time per output token, p50 (ms)"):
        assert f"<!-- {text} -->" in drawn


@pytest.mark.usefixtures("fake_llm")
def test_files_of_one_name_stay_two_configurations(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    configs = [ngram(tmp_path), ngram(tmp_path / "other"), ngram(tmp_path, "third")]
    report = tmp_path / "report.json"
    result = run("compare", *configs, "--dataset", dataset, "--report_json", report)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["configurations"]
    assert list(comparison_curves(rows)) == ["ngram", "ngram#2", "third"]


@pytest.mark.parametrize("name", ["plot.txt", "plot", "plot.png.gz"])
def test_an_unknown_suffix_is_refused_before_anything_runs(
    dataset: Path, tmp_path: Path, name: str
) -> None:
    result = run("compare", ngram(tmp_path), "--dataset", dataset, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert f"{name!r} does not end in a format of matplotlib; accepted: " in result.output
    assert ".png" in result.output


def test_a_missing_matplotlib_is_a_sentence(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    plot = tmp_path / "plot.png"
    result = run("compare", ngram(tmp_path), "--dataset", dataset, "--plot", plot)
    assert result.exit_code == 2
    sentence = "the package matplotlib is missing: pip install 'tllm_spec[plot]'"
    assert f"Invalid value for '--plot': {sentence}" in result.output
