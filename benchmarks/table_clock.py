"""An engine whose rounds take what a table says: real texts, drafts and decisions, and none of the
machine's noise.

What a controller measured at start-up is replaced by the same table, each entry off by a random
factor, as a start-up on a CPU is; every round that it is told of is off by one, too."""

import json
from bisect import bisect_left
from pathlib import Path
from random import Random
from typing import Any

from tllm_spec import LLM
from tllm_spec.executor.rounds.launched_round import LaunchedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

Table = dict[int, dict[int, float]]  # milliseconds by batch size and draft length


class TableClock:
    """In the place of an executor's clock. `total`: seconds of all rounds so far."""

    def __init__(
        self, llm: LLM, times: Path, *, start_up_spread: float, round_spread: float, seed: int
    ) -> None:
        tree = json.loads(times.read_text(encoding="utf-8"))
        self._greedy, self._sampled = (
            _table(tree[f"{which}_ms"]) for which in ("greedy", "sampled")
        )
        self._prompt_ms, self._spread, self._random = tree["prompt_ms"], round_spread, Random(seed)
        self.total, self._launched = 0.0, list[LaunchedRound]()
        executor = llm._executor
        update = executor._update_requests

        def watched(launched: LaunchedRound) -> Any:
            self._launched = [launched]
            return update(launched)

        executor._clock, executor._update_requests = self, watched  # type: ignore[assignment,method-assign] # a stand-in
        corrected = executor.parts.controller._times
        if corrected is not None:
            rough = {size: self._off(row, start_up_spread) for size, row in self._greedy.items()}
            added = {
                size: self._off(
                    {k: ms - self._greedy[size][k] for k, ms in row.items()}, start_up_spread
                )
                for size, row in self._sampled.items()
            }
            corrected._source = MeasuredRoundTimes(rough, sampling=added)
            corrected._rows.clear()

    def lap(self, *_: object) -> float:
        """Seconds of the round that is being read, as the controller is told."""
        batch = self._launched[0].batch
        ms = self._prompt_ms * len(batch.context_requests)
        if batch.generation_requests:
            table = self._sampled if batch.is_sampled else self._greedy
            ms += _at(table, len(batch.generation_requests), batch.draft_len)
        self.total += ms / 1e3
        return ms / 1e3 * self._random.lognormvariate(0, self._spread)

    def stop(self) -> None:
        """A round broke off."""

    def _off(self, row: dict[int, float], spread: float) -> dict[int, float]:
        return {
            steps: ms / 1e3 * self._random.lognormvariate(0, spread) for steps, ms in row.items()
        }


def _table(tree: dict[str, dict[str, float]]) -> Table:
    return {int(size): {int(steps): ms for steps, ms in row.items()} for size, row in tree.items()}


def _at(table: Table, batch_size: int, draft_len: int) -> float:
    return _between({size: _between(row, draft_len) for size, row in table.items()}, batch_size)


def _between(points: dict[int, float], place: int) -> float:
    """On the line between neighbours; `place` is within the points."""
    places = sorted(points)
    right = bisect_left(places, place)
    if places[right] == place:
        return points[place]
    low, high = places[right - 1], places[right]
    return points[low] + (points[high] - points[low]) * (place - low) / (high - low)
