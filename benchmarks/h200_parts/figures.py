"""Goals and the peers' figures of the 8B shape on one H200, and the tables. Measures nothing.

Peers: vLLM 0.26.0 (FlashAttention-3, torch.compile, full CUDA graphs) and SGLang 0.5.16 (fa3, CUDA
graphs) on the same kind of machine: Llama-3.1-8B's shape with random bf16 weights, 1024 tokens in
and 256 out, greedy, no prefix cache; EAGLE-3 with three drafts and a head of 32,000 tokens."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.report import number, numbers, table

Key = tuple[int, str]  # point, name
POINTS: Mapping[int, str] = {
    1: "Plain decoding",
    2: "Speculative decoding",
    3: "Prefill",
    4: "The host between two rounds",
    5: "Serving",
    6: "Start-up",
}
BATCHES = (1, 8, 64)
SIZES = ("1", "8", "64", "256")


@dataclass(frozen=True)
class Figure:
    """`floor`: what the bytes or operations alone would take. `details` explain the value."""

    point: int
    name: str
    unit: str
    value: float
    floor: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    unit: str
    goal: float | None = None
    peer: float | None = None

    def is_met(self, value: float) -> bool | None:
        if self.goal is None:
            return None
        return value >= self.goal if self.unit == "tok/s" else value <= self.goal


@dataclass(frozen=True)
class Peers:
    """A row of the headline. `names`: our figures, as `vllm` and `sglang` are ordered."""

    title: str
    names: tuple[Key, ...]
    vllm: tuple[float, ...]
    sglang: tuple[float, ...]


def at_batches(point: int, name: str, sizes: Iterable[int] = BATCHES) -> tuple[Key, ...]:
    return tuple((point, f"{name}, batch {size}") for size in sizes)


ROUND, WHOLE = at_batches(2, "EAGLE-3 K=3 round"), at_batches(2, "EAGLE-3 K=3 end to end")
PROMPT = at_batches(3, "one token through LLM.generate")
START_UP = ((6, "start-up, plain"), (6, "start-up, EAGLE-3 K=3"))
PEERS = tuple(
    Peers(*row)
    for row in (
        ("plain round, ms", at_batches(1, "plain round"), (4.94, 5.27, 7.80), (4.76, 5.17, 7.65)),
        ("EAGLE-3 round, ms", ROUND, (6.63, 7.57, 13.4), (6.03, 6.54, 11.8)),
        ("prefill of 1,024 tokens each, ms", PROMPT, (25, 186, 1527), (28, 184, 1511)),
        ("EAGLE-3 end to end, tok/s", WHOLE, (378, 2208, 5667), (414, 2464, 5980)),
        ("start-up, plain / EAGLE-3, s", START_UP, (69, 79), (65, 59)),
    )
)
NO_GOALS = (None, None, None)
# Point, name, unit, batch sizes, and the goal of each.
GOALS: Sequence[tuple[int, str, str, Sequence[int], Sequence[float | None]]] = (
    (1, "plain round", "ms", BATCHES, (4.3, 4.7, 7.2)),
    (2, "EAGLE-3 K=3 round", "ms", BATCHES, (5.2, 5.9, 11.0)),
    (2, "EAGLE-3 K=3 decoding", "tok/s", BATCHES, (490, None, None)),
    # 1.03 times the one-model rounds that were measured first: 4.69 / 5.57 / 11.0.
    (2, "EAGLE-3 two-model K=3 round", "ms", BATCHES, (4.83, 5.74, 11.3)),
    (2, "Draft/Target two-model K=3 round", "ms", BATCHES, (6.9, 8.19, 15.0)),
    (2, "plain end to end", "tok/s", BATCHES, NO_GOALS),
    (2, "EAGLE-3 K=3 end to end", "tok/s", BATCHES, NO_GOALS),
    (3, "64 prompts of 1024", "ms", (), (1450,)),
    (3, "1 prompt of 8192", "ms", (), (210,)),
    (3, "time to first token, 1 prompt of 1024", "ms", (), (25,)),
    (3, "one token through LLM.generate", "ms", BATCHES, NO_GOALS),
    (4, "host time, plain", "ms", (64,), (0.3,)),
    (4, "host time, EAGLE-3 K=3", "ms", (64,), (0.3,)),
    (4, "GPU idle between rounds, plain", "µs", (1, 64), (30, 30)),
    (4, "GPU idle between rounds, EAGLE-3 K=3", "µs", (1, 64), (30, 30)),
    (4, "GPU idle between rounds, EAGLE-3 two-model K=3", "µs", (1, 64), (30, 30)),
    (4, "GPU idle between rounds, Draft/Target two-model K=3", "µs", (1, 64), (30, 30)),
    (4, "GPU idle between rounds, NGram K=3", "µs", (1, 64), (None, None)),
    (5, "a prompt's delay of others / its own time, plain", "x", (64,), (1,)),
    (5, "a prompt's delay of others / its own time, EAGLE-3 K=3", "x", (64,), (1,)),
    (6, "start-up, plain", "s", (), (25,)),
    (6, "start-up, EAGLE-3 K=3", "s", (), (25,)),
)


def _references() -> Mapping[Key, Reference]:
    """Goals, and the better peer's figures."""
    peers: dict[Key, float] = {}
    for row in PEERS:
        better = max if row.title.endswith("tok/s") else min
        peers |= dict(zip(row.names, map(better, row.vllm, row.sglang), strict=True))
    found: dict[Key, Reference] = {}
    for point, name, unit, sizes, goals in GOALS:
        keys = at_batches(point, name, sizes) if sizes else ((point, name),)
        for key, goal in zip(keys, goals, strict=True):
            found[key] = Reference(unit, goal, peers.get(key))
    return found


REFERENCES = _references()


def missing(
    figures: Iterable[Figure], references: Mapping[Key, Reference], points: Iterable[int]
) -> list[Key]:
    """What should have been measured and was not."""
    found, wanted = {(figure.point, figure.name) for figure in figures}, set(points)
    return [key for key in references if key[0] in wanted and key not in found]


def point_table(
    point: int, figures: Sequence[Figure], references: Mapping[Key, Reference]
) -> list[str]:
    """A point's figures; what is missing is shown as failed."""
    titles = ("", "measured", "goal", "met", "better peer", "floor", "of the floor", "")
    rows = [
        _cells(figure, references.get((point, figure.name)) or Reference(figure.unit))
        for figure in figures
        if figure.point == point
    ]
    for _, name in missing(figures, references, [point]):
        reference = references[point, name]
        cells = (name, "**failed**", number(reference.goal), "no", number(reference.peer))
        rows.append([*cells, "", "", ""])
    return [f"### {point}. {POINTS[point]}", "", *table(titles, rows), ""]


def _cells(figure: Figure, reference: Reference) -> list[str]:
    met = {True: "yes", False: "**no**", None: ""}[reference.is_met(figure.value)]
    share = "" if figure.floor is None else f"{figure.value / figure.floor:.2f}x"
    details = ", ".join(f"{name} {number(value)}" for name, value in figure.details.items())
    measured = f"{number(figure.value)} {figure.unit}"
    limits = (number(reference.goal), met, number(reference.peer), number(figure.floor))
    return [figure.name, measured, *limits, share, details]


def headline(figures: Sequence[Figure]) -> list[str]:
    """Ours next to the peers'."""
    ours = {(figure.point, figure.name): figure.value for figure in figures}
    rows = [
        [
            row.title,
            numbers(row.vllm),
            numbers(row.sglang),
            f"**{numbers(ours[name] for name in row.names)}**",
        ]
        for row in PEERS
    ]
    return table(("batch 1 / 8 / 64", "vLLM 0.26.0", "SGLang 0.5.16", "tllm_spec"), rows)


SIZE = re.compile(r", (?:batch (\d+)$|(\d+) at a time)")
# Not in the summary, but in the result file, or already in the headline.
LEFT_OUT = re.compile(r"K=[157]|decoding|EAGLE-3 K=3 end to end|one token")


def summary(figures: Sequence[Figure]) -> list[str]:
    """The figures that are measured at several batch sizes, one row each, with goals and floors."""
    rows: dict[str, dict[str, Figure]] = defaultdict(dict)
    for figure in figures:
        found = SIZE.search(figure.name)
        if found and not LEFT_OUT.search(figure.name):
            title = f"{SIZE.sub('', figure.name)}, {figure.unit}"
            rows[title][found[1] or found[2]] = figure
    cells = []
    for title, by_size in rows.items():
        values = [f"{number(each.value) if (each := by_size.get(size)) else ''}" for size in SIZES]
        goals = [REFERENCES.get((f.point, f.name), Reference("")).goal for f in by_size.values()]
        floors = [figure.floor for figure in by_size.values()]
        cells.append([title, *values, *(numbers(c) if any(c) else "" for c in (goals, floors))])
    return table(("batch, or requests at a time", *SIZES, "goals", "floors"), cells)
