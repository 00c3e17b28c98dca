"""A picture of throughput against latency, as SVG text: no library is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 60
COLORS = ("#0b62c4", "#a84b00", "#18703c", "#8a3fa0", "#b3261e", "#4b5563")


def line_plot(curves: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """One line for each name, with its points marked. Both axes begin at 0."""
    points = [point for curve in curves.values() for point in curve]
    max_x = max((x for x, _ in points), default=0.0) * 1.05 or 1.0
    max_y = max((y for _, y in points), default=0.0) * 1.05 or 1.0

    def place(point: Point) -> tuple[float, float]:
        x, y = point
        return (
            LEFT + x / max_x * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / max_y * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for step in range(6):
        x, y = place((max_x * step / 5, max_y * step / 5))
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{max_y * step / 5:.4g}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{max_x * step / 5:.4g}</text>",
        ]
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        places = [place(point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
        parts.append(
            f'<text x="{LEFT + 10}" y="{TOP + 14 + 16 * number}" fill="{color}">'
            f"{escape(name)}</text>"
        )
    middle = (HEIGHT - BOTTOM) / 2
    parts += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
        "</svg>\n",
    ]
    return "\n".join(parts)
