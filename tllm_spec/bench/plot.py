"""Draws throughput against latency with matplotlib (the extra `plot`): one curve a configuration.

Curves differ in marker and line style too, so that a print without colours can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_spec.bench.report import load_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "the package matplotlib is missing: pip install 'tllm_spec[plot]'"
THROUGHPUT_LABEL = "throughput (output tokens/s)"
LATENCIES = {
    "tpot_ms": "time per output token, p50 (ms)",
    "ttft_ms": "time to first token, p50 (ms)",
    "e2el_ms": "request latency, p50 (ms)",
}
LOADS = "concurrency, or requests per second as 4/s"
MAX_PANELS = 2
STYLES: dict[str, list[Any]] = {
    "color": ["#0b3d91", "#c05a00", "#3a8f5c", "#7a3fa0", "#b3261e", "#4b5563"],
    "marker": ["o", "s", "^", "D", "v", "P"],
    "linestyle": ["-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1))],
}
# Behind a label, so that a line that runs through it can be seen and the label read.
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
PANEL_INCHES = (5.5, 5.0)
DOTS_PER_INCH = 120


@dataclass(frozen=True)
class LoadPoint:
    """What one load gave: output tokens per second of all requests together, and medians over the
    requests by their name in LATENCIES; 0: no request has that time."""

    load: str
    output_tokens_per_s: float
    latencies: Mapping[str, float]


Curves = Mapping[str, Sequence[LoadPoint]]


def serve_curve(loads: Sequence[Mapping[str, Any]]) -> list[LoadPoint]:
    """The curve of the loads in a report of `tllm-bench serve`."""
    return [
        LoadPoint(
            load["load"].removeprefix("concurrency ").replace(" requests/s", "/s"),
            load["output_throughput_tok_s"],
            _latencies(load),
        )
        for load in loads
    ]


def read_serve_report(path: Path) -> tuple[str, list[LoadPoint]]:
    """The label and the curve of a `--report_json` file of `tllm-bench serve`. Raises ValueError
    for any other file."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return report["label"], serve_curve(report["loads"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"plot_reports = {str(path)!r} is no --report_json file of tllm-bench serve"
        ) from error


def comparison_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[LoadPoint]]:
    """The curves of the rows of `tllm-bench compare`."""
    curves: dict[str, list[LoadPoint]] = {}
    for row in rows:
        load = load_of(row["concurrency"])
        point = LoadPoint(load, row["output_tokens_per_s"], _latencies(row))
        curves.setdefault(row["configuration"], []).append(point)
    return curves


def _latencies(report: Mapping[str, Any]) -> dict[str, float]:
    return {name: report[name]["p50"] for name in LATENCIES if name in report}


def check_format(path: Path) -> None:
    """Raises ValueError without matplotlib, and for a suffix that it does not write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError(MISSING) from error
    accepted = [f".{name}" for name in sorted(FigureCanvasBase.get_supported_filetypes())]
    if path.suffix.lower() not in accepted:
        raise ValueError(
            f"{path.name!r} does not end in a format of matplotlib; accepted: {', '.join(accepted)}"
        )


def draw(curves: Curves, title: str, labels: str = LOADS) -> Figure:
    """A figure with a panel for each of the first two latencies that any load has. Throughput is
    upwards, so that up and left is better. Points are labelled with their load, or what `labels`
    says."""
    from matplotlib.figure import Figure

    found = {name for curve in curves.values() for point in curve for name in _measured(point)}
    latencies = [name for name in LATENCIES if name in found][:MAX_PANELS] or ["e2el_ms"]
    width, height = PANEL_INCHES
    figure = Figure((width * len(latencies), height), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(1, len(latencies), sharey=True, squeeze=False)[0]
    for panel, latency in zip(panels, latencies, strict=True):
        _draw_panel(panel, curves, latency)
        panel.set_xlabel(LATENCIES[latency])
        panel.grid(color="#dddddd")
        panel.margins(0.15)  # room for the labels of the outermost points
    for panel in panels:
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    figure.suptitle(title, fontsize="medium")
    panels[0].set_ylabel(THROUGHPUT_LABEL)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(latencies),
        handlelength=4,
        title=f"numbers: {labels}",
    )
    return figure


def _measured(point: LoadPoint) -> list[str]:
    return [name for name, latency in point.latencies.items() if latency > 0]


def _draw_panel(panel: Axes, curves: Curves, latency: str) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        points = [point for point in curve if latency in _measured(point)]
        x = [point.latencies[latency] for point in points]
        y = [point.output_tokens_per_s for point in points]
        style = {key: values[number % len(values)] for key, values in STYLES.items()}
        panel.plot(x, y, label=name, **style)
        for point, place in zip(points, zip(x, y, strict=True), strict=True):
            panel.annotate(
                point.load,
                place,
                (6, -10),
                textcoords="offset points",
                color=style["color"],
                bbox=LABEL_BOX,
            )


def title_of(model: str) -> str:
    """The model and the day."""
    return f"{model}, {date.today().isoformat()}"


def image(figure: Figure, suffix: str) -> bytes:
    """The file's content. suffix: with its dot, one that `check_format` accepts."""
    content = BytesIO()
    figure.savefig(content, format=suffix.removeprefix(".").lower())
    return content.getvalue()
