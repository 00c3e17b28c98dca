"""Timelines as an SVG that is readable on light and dark pages. Measures nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from benchmarks.harness.spans import DEVICE, HOST, Span, Timeline

WIDTH, LEFT, RIGHT, TOP = 960.0, 64.0, 16.0, 44.0
LANE, GAP, TITLE = 22.0, 4.0, 24.0  # heights
PATH = TITLE + 2 * (LANE + GAP) + 14.0
COLORS = {
    "schedule": "#8e6bbf", "launch": "#2f81f7", "read": "#2da44e", "wait": "#8b949e",
    "target": "#d9822b", "draft": "#bf3989", "idle": "#e5484d",
}  # fmt: skip
NAMES = {
    "wait": "waits for the device", "target": "target (one-model graph: with drafts)",
    "draft": "draft graph",
}  # fmt: skip
STYLE = """\
text{font:13px system-ui,sans-serif;fill:#1f2328}
.small{font-size:11px;fill:#59636e}
.page{fill:#ffffff}
.line{stroke:#59636e;stroke-width:.5}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}
.small{fill:#9198a1}
.page{fill:#0d1117}
.line{stroke:#9198a1}
}"""


def draw(timelines: Sequence[Timeline]) -> str:
    """Two lanes, host and device, for each path, all on one scale of time."""
    longest = max(span.end for each in timelines for span in each.spans)
    scale = (WIDTH - LEFT - RIGHT) / longest
    bottom = TOP + PATH * len(timelines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {bottom + 28:.0f}">',
        f"<style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        *_legend(),
    ]
    for number, each in enumerate(timelines):
        parts += _path(each, TOP + PATH * number, scale)
    return "\n".join([*parts, *_axis(longest, bottom, scale), "</svg>", ""])


def _legend() -> Iterable[str]:
    x = LEFT
    for kind in (*HOST, *DEVICE):
        name = NAMES.get(kind, kind)
        yield f'<rect x="{x:.0f}" y="12" width="11" height="11" rx="2" fill="{COLORS[kind]}"/>'
        yield f'<text class="small" x="{x + 16:.0f}" y="22">{name}</text>'
        x += 36 + 6.2 * len(name)


def _path(timeline: Timeline, top: float, scale: float) -> Iterable[str]:
    figures = f"round {timeline.round_us / 1e3:.2f} ms, device idle {timeline.idle_us:.0f} µs"
    yield f'<text x="{LEFT:.0f}" y="{top + 16:.0f}">{escape(timeline.path)}: {figures}</text>'
    for number, lane in enumerate(("host", "device")):
        y = top + TITLE + number * (LANE + GAP)
        yield f'<text class="small" x="8" y="{y + 15:.0f}">{lane}</text>'
        for span in timeline.spans:
            if span.is_host == (lane == "host"):
                yield _bar(span, y, scale)


def _bar(span: Span, y: float, scale: float) -> str:
    """Nested spans come later, over the outer ones. A span has at least a visible width."""
    length = span.end - span.start
    box = f'x="{LEFT + span.start * scale:.2f}" y="{y:.0f}" width="{max(0.8, length * scale):.2f}"'
    title = f"<title>{span.kind} {length:.1f} µs</title>"
    return f'<rect {box} height="{LANE:.0f}" fill="{COLORS[span.kind]}">{title}</rect>'


def _axis(longest: float, y: float, scale: float) -> Iterable[str]:
    step = next(
        step for step in (100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6) if longest / step <= 12
    )
    yield f'<line class="line" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y:.0f}" y2="{y:.0f}"/>'
    for number in range(int(longest / step) + 1):
        x = LEFT + number * step * scale
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.0f}" y2="{y + 4:.0f}"/>'
        label = f"{number * step / 1e3:g} ms"
        place = f'x="{x:.1f}" y="{y + 18:.0f}" text-anchor="middle"'
        yield f'<text class="small" {place}>{label}</text>'
