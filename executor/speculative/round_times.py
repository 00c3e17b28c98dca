"""How long a round takes, by batch size and draft length: measured at start-up, corrected while serving.

It knows nothing of tokens, nor how long contexts are. Seconds are those of rounds that only generate; a context chunk
in a round makes its time meaningless here.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tllm_spec.adaptive_config import RoundTimeOptions
from tllm_spec.option_checks import shown

MAX_SURPRISE = 2.0  # a time further from its expectation than this factor counts as that far


class RoundTimes(Protocol):
    of_empty_contexts: bool
    """Whether no keys were read in these rounds."""

    def round_time(self, batch_size: int, draft_len: int) -> float:
        """Seconds of a round with `draft_len` drafts a request; 0 = plain decoding."""


@dataclass(frozen=True)
class AssumedRoundTimes:
    """Where nothing was measured: every draft costs the same share of a plain round, at any batch size."""

    draft_cost: float
    of_empty_contexts = False

    def round_time(self, batch_size: int, draft_len: int) -> float:
        return 1 + self.draft_cost * draft_len


class MeasuredRoundTimes:
    """Times at some batch sizes and draft lengths; between them, and beyond the last, straight lines."""

    def __init__(
        self, seconds: Mapping[int, Mapping[int, float]], *, of_empty_contexts: bool = False
    ) -> None:
        self.of_empty_contexts = of_empty_contexts
        if not seconds or not all(row and min(row.values()) > 0 for row in seconds.values()):
            raise ValueError("round times need at least one batch size, each with times above 0")
        self._rows = {size: sorted(row.items()) for size, row in sorted(seconds.items())}

    @classmethod
    def from_json(cls, tree: Any) -> "MeasuredRoundTimes":
        """`{"round_ms": {"<batch size>": {"<draft length>": milliseconds}}}`. Raises ValueError for anything else."""
        try:
            rows = {
                int(size): {int(steps): float(ms) / 1e3 for steps, ms in row.items()}
                for size, row in tree["round_ms"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError):
            needed = '{"round_ms": {"8": {"0": 4.7, "1": 5.0}}}'
            raise ValueError(f"round times = {shown(tree)} are not understood; needed: {needed}") from None
        return cls(rows)

    def round_time(self, batch_size: int, draft_len: int) -> float:
        at_size = [(size, _on_line(row, draft_len)) for size, row in self._rows.items()]
        return _on_line(at_size, batch_size)


def _on_line(points: list[tuple[int, float]], at: int) -> float:
    """Linear between neighbours; the last two points' line beyond them; the first value before them."""
    places = [place for place, _ in points]
    right = bisect_left(places, at)
    if right == 0 or (right < len(points) and places[right] == at):
        return points[right][1]
    if len(points) == 1:
        return points[0][1]
    right = min(right, len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


class _Scale:
    """A slower clock, or other work on the machine, stretches rounds of all lengths."""

    value = 1.0

    def of(self, own: float) -> float:
        return own * self.value

    def found(self, seconds: float, own: float) -> float:
        return seconds / own


class _Extra:
    """Reading the contexts takes as long in a round of any length."""

    value = 0.0

    def of(self, own: float) -> float:
        return max(own + self.value, own / MAX_SURPRISE)

    def found(self, seconds: float, own: float) -> float:
        return seconds - own


class _Row:
    """One batch size: measured times, what all of them were off by, and what each was off by itself."""

    def __init__(self, measured: dict[int, float], common: "_Scale | _Extra") -> None:
        self.measured, self.common = measured, common
        self.factors = dict.fromkeys(measured, 1.0)
        self.seconds = dict(measured)  # what decisions compare
        self.num_observed = 0

    def own(self, steps: int) -> float:
        return self.measured[steps] * self.factors[steps]


class CorrectedRoundTimes:
    """What all lengths of a batch size are off by is learned fast: an extra time where the measured rounds had empty
    contexts, a factor elsewhere. A length's own factor is learned slowly, and fades where it cannot be told from the
    common one because no other length is played.
    """

    def __init__(self, source: RoundTimes, draft_lens: tuple[int, ...], options: RoundTimeOptions) -> None:
        self._source, self._draft_lens, self._options = source, draft_lens, options
        self._rows: dict[int, _Row] = {}

    def row(self, batch_size: int) -> dict[int, float]:
        """Seconds by draft length, up to a factor that all of them share."""
        return self._row(batch_size).seconds

    def _row(self, batch_size: int) -> _Row:
        if batch_size not in self._rows:
            times = {steps: self._source.round_time(batch_size, steps) for steps in self._draft_lens}
            self._rows[batch_size] = _Row(times, _Extra() if self._source.of_empty_contexts else _Scale())
        return self._rows[batch_size]

    def observe(self, batch_size: int, draft_len: int, seconds: float) -> None:
        row, options = self._row(batch_size), self._options
        if draft_len not in row.measured:
            return  # a limit's length, which no decision compares
        row.num_observed += 1
        common, own = row.common, row.own(draft_len)
        is_settled = row.num_observed * options.time_smoothing > 1
        if is_settled:
            expected = common.of(own)
            seconds = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        rate = max(1 / row.num_observed, options.time_smoothing)
        common.value += rate * (common.found(seconds, own) - common.value)
        if is_settled:
            factor, share = row.factors[draft_len], options.time_cell_smoothing
            factor += share * (factor * (seconds / common.of(own) - 1) - (factor - 1) / 20)
            row.factors[draft_len] = factor
        if isinstance(common, _Extra):
            row.seconds = {steps: common.of(row.own(steps)) for steps in row.measured}
        else:  # what all are stretched by does not matter to a comparison
            row.seconds[draft_len] = row.own(draft_len)

    def state(self) -> dict[str, Any]:
        """Milliseconds as now expected, by batch size and draft length."""
        return {
            str(size): {str(steps): row.common.of(row.own(steps)) * 1e3 for steps in row.measured}
            for size, row in sorted(self._rows.items())
        }
