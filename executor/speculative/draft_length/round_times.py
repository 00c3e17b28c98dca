"""How long a round takes, by batch size and tier: measured at start-up, and on a GPU
corrected while serving by what the present contexts add."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tllm_spec.config.option_checks import shown

ASSUMED_DRAFT_COST = 0.06  # plain rounds that a draft takes, where nothing was measured
SMOOTHING = 0.05  # weight of a round's time in the correction
MAX_CORRECTION = 0.5  # of the measured time: further off is a hiccup of the machine


class MeasuredRoundTimes:
    """Times at some batch sizes and tiers; straight lines between them and beyond."""

    def __init__(
        self, seconds: Mapping[int, Mapping[int, float]], *, has_contexts: bool = False
    ) -> None:
        """seconds: by batch size and tier. has_contexts: whether contexts were read in these
        rounds, so that other contexts take another time. Raises ValueError for an empty table or
        times that are not above 0."""
        if not seconds or not all(row and min(row.values()) > 0 for row in seconds.values()):
            raise ValueError("round times need at least one batch size, each with times above 0")
        self.has_contexts = has_contexts
        self._rows = {size: sorted(row.items()) for size, row in sorted(seconds.items())}

    @classmethod
    def from_json(cls, tree: Any) -> "MeasuredRoundTimes":
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
        return cls(rows)

    def round_time(self, batch_size: int, tier: int) -> float:
        """Seconds of a round of this tier; 0 = plain decoding."""
        by_size = [(size, _interpolated(row, tier)) for size, row in self._rows.items()]
        return _interpolated(by_size, batch_size)


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
    same time to all tiers of a batch size. It is learned from the rounds that are run. Without
    contexts in the measured times there is no correction: a slower clock stretches all tiers alike,
    and comparisons are between ratios."""

    def __init__(self, source: MeasuredRoundTimes, tiers: Sequence[int]) -> None:
        self._source, self._tiers = source, tiers
        self._measured: dict[int, dict[int, float]] = {}
        self._rows: dict[int, dict[int, float]] = {}
        self._added: dict[int, float] = {}  # seconds, by batch size

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
        error = max(-most, min(seconds - expected, most))
        added = self._added.get(batch_size, 0.0) + SMOOTHING * error
        least = -MAX_CORRECTION * min(measured.values())
        added = self._added[batch_size] = max(added, least)
        self._rows[batch_size] = {tier: time + added for tier, time in measured.items()}

    def state(self, name: Callable[[int], object] = str) -> dict[str, Any]:
        """Milliseconds as now expected, by batch size and tier. name: of a tier."""
        return {
            str(size): {str(name(tier)): seconds * 1e3 for tier, seconds in row.items()}
            for size, row in sorted(self._rows.items())
        }
