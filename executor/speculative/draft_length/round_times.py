"""How long a round takes, by batch size and draft length: measured at start-up, corrected while
serving.

It knows nothing of tokens, nor how long contexts are. Seconds are those of rounds that only
generate; a context chunk in a round makes its time meaningless here."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Any, Protocol

from tllm_spec.adaptive_config import RoundTimeOptions
from tllm_spec.option_checks import shown

LEAST_SHARE = 0.25
MAX_SURPRISE = 2.0  # a time further from its expectation than this factor counts as that far


class RoundTimes(Protocol):
    of_empty_contexts: bool
    """Whether no keys were read in these rounds."""

    def round_time(self, batch_size: int, draft_len: int) -> float:
        """Seconds of a round with `draft_len` drafts a request; 0 = plain decoding."""

    def sampling_time(self, batch_size: int, draft_len: int) -> float:
        """Seconds that a round takes longer where not all requests are greedy."""
        return 0.0

    def context_time(self, batch_size: int, draft_len: int) -> float:
        """What contexts add to it, in any unit; wide windows take longer over them."""
        return 1.0


@dataclass(frozen=True)
class AssumedRoundTimes(RoundTimes):
    """Where nothing was measured: every draft costs the same share of a plain round, at any batch
    size."""

    draft_cost: float
    of_empty_contexts = False

    def round_time(self, batch_size: int, draft_len: int) -> float:
        return 1 + self.draft_cost * draft_len


class MeasuredRoundTimes(RoundTimes):
    """Times at some batch sizes and draft lengths; between them, and beyond the last, straight
    lines. `contexts`: what the same contexts added to each; None: not known, so the same to all.
    `sampling`: what it adds to greedy rounds, by size and length, perhaps of fewer sizes; None:
    nothing."""

    def __init__(
        self,
        seconds: Mapping[int, Mapping[int, float]],
        *,
        of_empty_contexts: bool = False,
        contexts: Mapping[int, Mapping[int, float]] | None = None,
        sampling: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        self.of_empty_contexts = of_empty_contexts
        self._contexts, self._sampling = _sorted(contexts or {}), _sorted(sampling or {})
        if not seconds or not all(row and min(row.values()) > 0 for row in seconds.values()):
            raise ValueError("round times need at least one batch size, each with times above 0")
        self._rows = _sorted(seconds)

    @classmethod
    def from_json(cls, tree: Any) -> "MeasuredRoundTimes":
        """`{"round_ms": {"<batch size>": {"<draft length>": milliseconds}}}`. Raises ValueError for
        anything else."""
        try:
            rows = {
                int(size): {int(steps): float(ms) / 1e3 for steps, ms in row.items()}
                for size, row in tree["round_ms"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError):
            needed = '{"round_ms": {"8": {"0": 4.7, "1": 5.0}}}'
            raise ValueError(
                f"round times = {shown(tree)} are not understood; needed: {needed}"
            ) from None
        return cls(rows)

    def round_time(self, batch_size: int, draft_len: int) -> float:
        return _at(self._rows, batch_size, draft_len)

    def sampling_time(self, batch_size: int, draft_len: int) -> float:
        return max(0.0, _at(self._sampling, batch_size, draft_len)) if self._sampling else 0.0

    def context_time(self, batch_size: int, draft_len: int) -> float:
        return _at(self._contexts, batch_size, draft_len) if self._contexts else 1.0


def _sorted(rows: Mapping[int, Mapping[int, float]]) -> dict[int, list[tuple[int, float]]]:
    return {size: sorted(row.items()) for size, row in sorted(rows.items())}


def _at(rows: Mapping[int, list[tuple[int, float]]], batch_size: int, draft_len: int) -> float:
    return _on_line([(size, _on_line(row, draft_len)) for size, row in rows.items()], batch_size)


def _on_line(points: list[tuple[int, float]], at: int) -> float:
    """Linear between neighbours; the last two points' line beyond them; the first value before
    them."""
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

    def of(self, own: float, share: float) -> float:
        return own * self.value

    def compared(self, own: dict[int, float], shares: dict[int, float]) -> dict[int, float]:
        """What all are stretched by does not matter to a comparison."""
        return own

    def found(self, seconds: float, own: float, share: float) -> float:
        return seconds / own


class _Extra:
    """Reading the contexts adds to rounds of every length, to each its share."""

    value = 0.0

    def of(self, own: float, share: float) -> float:
        return max(own + self.value * share, own / MAX_SURPRISE)

    def compared(self, own: dict[int, float], shares: dict[int, float]) -> dict[int, float]:
        value = self.value
        if value < 0:
            return {steps: self.of(time, shares[steps]) for steps, time in own.items()}
        return {steps: time + value * shares[steps] for steps, time in own.items()}

    def found(self, seconds: float, own: float, share: float) -> float:
        return (seconds - own) / share


class _Row:
    """Rounds of one batch size, sampled or greedy: measured times, what all of them were off by,
    and what each was off by itself."""

    def __init__(
        self, measured: dict[int, float], contexts: dict[int, float], common: "_Scale | _Extra"
    ) -> None:
        line = _context_line(contexts)
        self.measured, self.common = _measured_twice(measured, contexts, line), common
        mean = fmean(line.values())
        self.shares = {steps: added / mean for steps, added in line.items()}  # of what contexts add
        self.factors = dict.fromkeys(measured, 1.0)
        self.own = dict(self.measured)  # times their factors
        self.seconds = self.own  # what decisions compare
        self.num_observed = 0

    def expected(self, steps: int) -> float:
        return self.common.of(self.own[steps], self.shares[steps])


def _context_line(contexts: Mapping[int, float]) -> dict[int, float]:
    """What contexts add, by draft length, in seconds; 1 each where that is not known. It was
    measured as differences of long times, so a single one is not believed but the line through all,
    unless it falls: a wider window never takes less; nor what is far below the average."""
    mean = fmean(contexts.values())
    if mean <= 0:
        return dict.fromkeys(contexts, 1.0)
    if len(contexts) < 2:
        return dict(contexts)
    slope = max(linear_regression(list(contexts), list(contexts.values())).slope, 0.0)
    middle = fmean(contexts)
    return {steps: max(mean + slope * (steps - middle), LEAST_SHARE * mean) for steps in contexts}


def _measured_twice(
    measured: Mapping[int, float], contexts: Mapping[int, float], line: Mapping[int, float]
) -> dict[int, float]:
    """Rounds with contexts, less what the line says that contexts add, are a second measurement of
    the same times. The mean of both is off by less than either; but never far from the first,
    should the second be nonsense."""
    if fmean(contexts.values()) <= 0:
        return dict(measured)
    both = {steps: time + (contexts[steps] - line[steps]) / 2 for steps, time in measured.items()}
    return {
        steps: min(max(both[steps], time / MAX_SURPRISE), time * MAX_SURPRISE)
        for steps, time in measured.items()
    }


class CorrectedRoundTimes:
    """What all lengths of a batch size are off by is learned fast: what contexts add where the
    measured rounds had empty ones, a factor elsewhere. A length's own factor is learned slowly, and
    fades where it cannot be told from the common one because no other length is played."""

    def __init__(
        self, source: RoundTimes, draft_lens: tuple[int, ...], options: RoundTimeOptions
    ) -> None:
        self._source, self._draft_lens = source, draft_lens
        self._smoothing, self._cell_smoothing = options.time_smoothing, options.time_cell_smoothing
        self._rows: dict[tuple[int, bool], _Row] = {}

    def row(self, batch_size: int, sampled: bool = False) -> dict[int, float]:
        """Seconds by draft length, up to a factor that all of them share."""
        return (self._rows.get((batch_size, sampled)) or self._new_row(batch_size, sampled)).seconds

    def _new_row(self, batch_size: int, sampled: bool) -> _Row:
        times = {steps: self._source.round_time(batch_size, steps) for steps in self._draft_lens}
        if sampled:
            times = {
                s: time + self._source.sampling_time(batch_size, s) for s, time in times.items()
            }
        contexts = {
            steps: self._source.context_time(batch_size, steps) for steps in self._draft_lens
        }
        common = _Extra() if self._source.of_empty_contexts else _Scale()
        row = self._rows[batch_size, sampled] = _Row(times, contexts, common)
        return row

    def observe(
        self, batch_size: int, draft_len: int, seconds: float, sampled: bool = False
    ) -> None:
        row = self._rows.get((batch_size, sampled)) or self._new_row(batch_size, sampled)
        smoothing = self._smoothing
        if draft_len not in row.measured:
            return  # a limit's length, which no decision compares
        row.num_observed += 1
        common, own, share = row.common, row.own[draft_len], row.shares[draft_len]
        is_settled = row.num_observed * smoothing > 1
        if is_settled:
            expected = common.of(own, share)
            if seconds < expected / MAX_SURPRISE:
                seconds = expected / MAX_SURPRISE
            elif seconds > expected * MAX_SURPRISE:
                seconds = expected * MAX_SURPRISE
        rate = smoothing if is_settled else 1 / row.num_observed
        common.value += rate * (common.found(seconds, own, share) - common.value)
        if is_settled:
            factor = row.factors[draft_len]
            surprise = seconds / common.of(own, share) - 1
            factor += self._cell_smoothing * (factor * surprise - (factor - 1) / 20)
            row.factors[draft_len], row.own[draft_len] = factor, row.measured[draft_len] * factor
        row.seconds = common.compared(row.own, row.shares)

    def beyond(
        self, batch_size: int, draft_len: int, seconds: float, sampled: bool = False
    ) -> float:
        """By how many of such rounds one took longer than expected."""
        row = self._rows.get((batch_size, sampled)) or self._new_row(batch_size, sampled)
        return max(0.0, seconds / row.expected(draft_len) - 1)

    def state(self) -> dict[str, Any]:
        """Milliseconds as now expected, by batch size, way of sampling and draft length."""
        return {
            row_name(*key): {str(steps): row.expected(steps) * 1e3 for steps in row.measured}
            for key, row in sorted(self._rows.items())
        }


def row_name(batch_size: int, sampled: bool) -> str:
    return f"{batch_size} sampled" if sampled else str(batch_size)
