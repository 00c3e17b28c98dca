"""What one H200 is held to with the 8B shape: bars, the better peer's figures; and a measured
figure beside them.

Peers, measured on such a machine: vLLM 0.26.0 and SGLang 0.5.16, FlashAttention-3, full CUDA
graphs, random weights, 1024 tokens in and 256 out, greedy, no prefix cache. Data and tables only;
nothing here measures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

POINTS: Mapping[int, str] = {
    1: "Plain decoding",
    2: "Speculative decoding",
    3: "Prefill",
    4: "The host between two rounds",
    5: "Serving",
    6: "Start-up",
}
MORE_IS_BETTER = ("tok/s",)


@dataclass(frozen=True)
class Figure:
    """`floor`: what the bytes or operations alone would take. `details`: figures that explain
    it."""

    point: int
    name: str
    unit: str
    value: float
    floor: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """None: there is no such figure."""

    unit: str
    bar: float | None = None
    peer: float | None = None
    stretch: float | None = None

    def is_met(self, value: float) -> bool | None:
        if self.bar is None:
            return None
        return value >= self.bar if self.unit in MORE_IS_BETTER else value <= self.bar


REFERENCES: Mapping[tuple[int, str], Reference] = {
    (1, "plain round, batch 1"): Reference("ms", 4.3, 4.76, stretch=3.9),
    (1, "plain round, batch 8"): Reference("ms", 4.7, 5.17),
    (1, "plain round, batch 64"): Reference("ms", 7.2, 7.65),
    (2, "EAGLE-3 K=3 round, batch 1"): Reference("ms", 5.2, 6.03, stretch=4.7),
    (2, "EAGLE-3 K=3 round, batch 8"): Reference("ms", 5.9, 6.54),
    (2, "EAGLE-3 K=3 round, batch 64"): Reference("ms", 11.0, 11.8),
    (2, "EAGLE-3 K=3 decoding, batch 1"): Reference("tok/s", 490, 433),
    (2, "EAGLE-3 K=3 decoding, batch 8"): Reference("tok/s", None, 3197),
    (2, "EAGLE-3 K=3 decoding, batch 64"): Reference("tok/s", None, 14171),
    (2, "plain end to end, batch 1"): Reference("tok/s", None, 206),
    (2, "plain end to end, batch 8"): Reference("tok/s", None, 1363),
    (2, "plain end to end, batch 64"): Reference("tok/s", None, 4735),
    (2, "EAGLE-3 K=3 end to end, batch 1"): Reference("tok/s", None, 414),
    (2, "EAGLE-3 K=3 end to end, batch 8"): Reference("tok/s", None, 2464),
    (2, "EAGLE-3 K=3 end to end, batch 64"): Reference("tok/s", None, 5980),
    (3, "64 prompts of 1024"): Reference("ms", 1450, 1511),
    (3, "1 prompt of 8192"): Reference("ms", 210),
    (3, "time to first token, 1 prompt of 1024"): Reference("ms", 25, 25),
    (3, "one token through LLM.generate, batch 1"): Reference("ms", None, 25),
    (3, "one token through LLM.generate, batch 8"): Reference("ms", None, 184),
    (3, "one token through LLM.generate, batch 64"): Reference("ms", None, 1511),
    (4, "host time, plain, batch 64"): Reference("ms", 0.3),
    (4, "host time, EAGLE-3 K=3, batch 64"): Reference("ms", 0.3),
    (4, "GPU idle between rounds, plain, batch 1"): Reference("µs", 30),
    (4, "GPU idle between rounds, plain, batch 64"): Reference("µs", 30),
    (4, "GPU idle between rounds, EAGLE-3 K=3, batch 1"): Reference("µs", 30),
    (4, "GPU idle between rounds, EAGLE-3 K=3, batch 64"): Reference("µs", 30),
    (5, "a prompt's delay of others / its own time, plain, batch 64"): Reference("x", 1.0),
    (5, "a prompt's delay of others / its own time, EAGLE-3 K=3, batch 64"): Reference("x", 1.0),
    (6, "start-up, plain"): Reference("s", 25, 65),
    (6, "start-up, EAGLE-3 K=3"): Reference("s", 25, 59),
}


def missing(
    figures: Iterable[Figure],
    references: Mapping[tuple[int, str], Reference],
    points: Iterable[int],
) -> list[tuple[int, str]]:
    """What should have been measured and was not."""
    found, wanted = {(figure.point, figure.name) for figure in figures}, set(points)
    return [key for key in references if key[0] in wanted and key not in found]


def table(
    point: int, figures: Sequence[Figure], references: Mapping[tuple[int, str], Reference]
) -> list[str]:
    """A point's lines of Markdown; what is missing stands there as failed."""
    lines = [
        f"### {point}. {POINTS[point]}",
        "",
        "| | measured | bar | met | better peer | floor | of the floor | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        if figure.point == point:
            lines.append(_line(figure, references.get((point, figure.name))))
    for _, name in missing(figures, references, [point]):
        reference = references[point, name]
        lines.append(
            f"| {name} | **failed** | {_bar(reference)} | no | {_number(reference.peer)} | | | |"
        )
    return lines


def _line(figure: Figure, reference: Reference | None) -> str:
    reference = reference or Reference(figure.unit)
    met = {True: "yes", False: "**no**", None: ""}[reference.is_met(figure.value)]
    share = "" if figure.floor is None else f"{figure.value / figure.floor:.2f}x"
    details = ", ".join(f"{name} {_number(value)}" for name, value in figure.details.items())
    cells = [
        figure.name,
        f"{_number(figure.value)} {figure.unit}",
        _bar(reference),
        met,
        _number(reference.peer),
        _number(figure.floor),
        share,
        details,
    ]
    return f"| {' | '.join(cells)} |"


def _bar(reference: Reference) -> str:
    stretch = "" if reference.stretch is None else f" ({_number(reference.stretch)})"
    return _number(reference.bar) + stretch


def _number(value: float | None) -> str:
    """Three digits or more, no needless ones; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
