"""How long a round takes, by batch size and tier: measured at start-up or read from a file, and on
a GPU corrected while serving by what the present contexts add."""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.option_checks import shown

ASSUMED_DRAFT_COST = 0.06  # plain rounds that a draft takes, where nothing was measured
SMOOTHING = 0.05  # weight of a round's time in the correction
TABLE = '{"token_counts": [1, 64], "step_time_ms": [4.7, 5.0]}'
MAX_CORRECTION = 0.5  # of the measured time: further off is a hiccup of the machine
MAX_ERROR = 0.1  # of the measured time: a tier's own
FORGOTTEN = 1 / 128  # of a tier's own error in each of its rounds: contexts change, too


class RoundTimes(Protocol):
    """has_contexts: whether contexts were read in these rounds, so that other contexts take another
    time."""

    has_contexts: bool

    def round_time(self, batch_size: int, tier: int) -> float:
        """Seconds of a round of this tier; 0 = plain decoding."""


class MeasuredRoundTimes:
    """Times at some batch sizes and tiers; straight lines between them and beyond."""

    def __init__(
        self, seconds: Mapping[int, Mapping[int, float]], *, has_contexts: bool = False
    ) -> None:
        """seconds: by batch size and tier. Raises ValueError for an empty table or times that are
        not above 0."""
        if not seconds or not all(row and min(row.values()) > 0 for row in seconds.values()):
            raise ValueError("round times need at least one batch size, each with times above 0")
        self.has_contexts = has_contexts
        self._rows = {size: sorted(row.items()) for size, row in sorted(seconds.items())}

    @classmethod
    def from_json(cls, tree: Any, *, has_contexts: bool = False) -> "MeasuredRoundTimes":
        """`{"round_ms": {"<batch size>": {"<draft length>": milliseconds}}}`. Raises ValueError for
        anything else."""
        try:
            rows = {
                int(size): {int(length): float(ms) / 1e3 for length, ms in row.items()}
                for size, row in tree["round_ms"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError):
            needed = '{"round_ms": {"8": {"0": 4.7, "1": 5.0}}}'
            raise ValueError(
                f"round times = {shown(tree)} are not understood; needed: {needed}"
            ) from None
        return cls(rows, has_contexts=has_contexts)

    def to_json(self, shapes: DraftShapes) -> dict[str, Any]:
        """As `read_table` takes it. The keys next to `round_ms` are those that TensorRT-LLM and
        SGLang read."""
        named = {
            str(size): {str(shapes.name(tier)): seconds * 1e3 for tier, seconds in row}
            for size, row in self._rows.items()
        }
        cells = {
            (size, shapes.of(tier).num_rows(size)): seconds * 1e3
            for size, row in self._rows.items()
            for tier, seconds in row
        }
        steps, added = _fitted(cells)
        return {
            "round_ms": named,
            "token_counts": list(steps),
            "step_time_ms": list(steps.values()),
            "batch_sizes": list(added),
            "batch_overhead_ms": list(added.values()),
        }

    def round_time(self, batch_size: int, tier: int) -> float:
        """Seconds of a round of this tier; 0 = plain decoding."""
        by_size = [(size, _interpolated(row, tier)) for size, row in self._rows.items()]
        return _interpolated(by_size, batch_size)


class StepTimes:
    """Round times as TensorRT-LLM and SGLang keep them: what the rows of a round take, the
    requests' own tokens included, and what the number of requests adds."""

    has_contexts = True

    def __init__(self, table: Mapping[str, Any], shapes: DraftShapes) -> None:
        """Raises ValueError for another table."""
        self._shapes = shapes
        try:
            steps = zip(table["token_counts"], table["step_time_ms"], strict=True)
            sizes, added = table.get("batch_sizes") or [0], table.get("batch_overhead_ms") or [0.0]
            self._steps = sorted((int(count), float(ms) / 1e3) for count, ms in steps)
            self._added = sorted(
                (int(size), float(ms) / 1e3) for size, ms in zip(sizes, added, strict=True)
            )
            self._fixed = float(table.get("fixed_overhead_ms") or 0.0) / 1e3
        except (KeyError, TypeError, ValueError, AttributeError):
            self._steps = []
        if not self._steps or min(ms for _, ms in self._steps) <= 0:
            raise ValueError(f"it has {shown(table)}; needed: {TABLE}")

    def round_time(self, batch_size: int, tier: int) -> float:
        rows = self._shapes.of(tier).num_rows(batch_size)
        added = _interpolated(self._added, batch_size)
        return _interpolated(self._steps, rows) + self._fixed + added


def _fitted(cells: Mapping[tuple[int, int], float]) -> tuple[dict[int, float], dict[int, float]]:
    """What so many rows take, and what so many requests add, 0 or more: the sums that come nearest
    to the times of these requests with these rows, by least squares."""
    counts, sizes = (sorted({cell[part] for cell in cells}) for part in (1, 0))
    terms = np.array(
        [
            [*(rows == each for each in counts), *(size == each for each in sizes)]
            for size, rows in cells
        ],
        dtype=np.float64,
    )
    found = np.linalg.lstsq(terms, np.array([*cells.values()]), rcond=None)[0].tolist()
    steps, added = found[: len(counts)], found[len(counts) :]
    least = min(added)
    return (
        {count: ms + least for count, ms in zip(counts, steps, strict=True)},
        {size: ms - least for size, ms in zip(sizes, added, strict=True)},
    )


def read_table(content: bytes, shapes: DraftShapes, tiers: Iterable[int]) -> RoundTimes:
    """A file of round times of these tiers. Raises ValueError for anything else."""
    try:
        table = json.loads(content)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(table, dict) or "round_ms" not in table:
        return StepTimes(table, shapes)
    tier_of = {str(shapes.name(tier)): tier for tier in tiers}
    own: dict[str, dict[int, Any]] = {}
    for size, row in dict(table["round_ms"]).items():
        own[size] = {tier_of[name]: ms for name, ms in dict(row).items() if name in tier_of}
    lacking = [
        name for name, tier in tier_of.items() if not any(tier in row for row in own.values())
    ]
    if lacking:
        raise ValueError(f"it has no times of draft lengths {', '.join(lacking)}")
    return MeasuredRoundTimes.from_json({"round_ms": own}, has_contexts=True)


def _interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    """Linear between neighbours and beyond the last two; the first value before the first."""
    right = bisect_left([x for x, _ in points], at)
    if right == 0 or (right < len(points) and points[right][0] == at):
        return points[right][1]
    if len(points) == 1:
        return points[0][1]
    right = min(right, len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


# Where nothing was measured: a draft takes the same share of a plain round everywhere.
ASSUMED_TIMES = MeasuredRoundTimes({1: {0: 1.0, 1: 1 + ASSUMED_DRAFT_COST}})


class CorrectedRoundTimes:
    """Round times, corrected while serving. Contexts that differ from the measured ones add the
    same time to all tiers of a batch size. It is learned from the rounds that are run. A difference
    between tiers is first an error of one tier's own measurement: a GPU's clock is lower after
    seconds of full load than during a short measurement. Without contexts in the measured times
    there is no correction: a slower clock stretches all tiers equally, and comparisons are between
    ratios."""

    def __init__(self, source: RoundTimes, tiers: Sequence[int]) -> None:
        self._source, self._tiers = source, tiers
        self._measured: dict[int, dict[int, float]] = {}
        self._rows: dict[int, dict[int, float]] = {}
        self._added: dict[int, float] = {}  # seconds, by batch size
        self._errors: dict[int, dict[int, float]] = {}  # by batch size and tier

    def row(self, batch_size: int) -> dict[int, float]:
        """Seconds by tier."""
        row = self._rows.get(batch_size)
        if row is None:
            row = {tier: self._source.round_time(batch_size, tier) for tier in self._tiers}
            self._measured[batch_size] = self._rows[batch_size] = row
        return row

    def observe(self, batch_size: int, tier: int, seconds: float) -> None:
        expected = self.row(batch_size).get(tier)
        if expected is None or not self._source.has_contexts:
            return
        measured = self._measured[batch_size]
        most = MAX_CORRECTION * measured[tier]
        step = SMOOTHING * max(-most, min(seconds - expected, most))
        errors = self._errors.setdefault(batch_size, dict.fromkeys(measured, 0.0))
        most, before = MAX_ERROR * measured[tier], errors[tier]
        errors[tier] = max(-most, min((1 - FORGOTTEN) * before + step, most))
        added = self._added.get(batch_size, 0.0) + before + step - errors[tier]
        least = -MAX_CORRECTION * min(measured.values())
        added = self._added[batch_size] = max(added, least)
        self._rows[batch_size] = {
            t: max(time + added + errors[t], (1 - MAX_CORRECTION) * time)
            for t, time in measured.items()
        }

    def state(self, name: Callable[[int], object] = str) -> dict[str, Any]:
        """Milliseconds as now expected, by batch size and tier. name: of a tier."""
        return {
            str(size): {str(name(tier)): seconds * 1e3 for tier, seconds in row.items()}
            for size, row in sorted(self._rows.items())
        }
