"""Tiers at start-up: which of them need CUDA graphs, and how long rounds of each take."""

from collections.abc import Callable, Mapping, Sequence

import torch

from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.speculative_config import DecodingBaseConfig
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.progress import progress

# Batch sizes whose rounds are timed where there are no graphs; others are interpolated.
EAGER_SIZES = (1, 2, 4, 8, 16)


def tiers_of_rounds(
    controller: AdaptiveController, spec: DecodingBaseConfig | None
) -> Callable[[int], set[int]]:
    """Tiers that rounds of a batch size can have: 0 where no request wants drafts, and any shorter
    length where a drafter on the host may propose fewer than it was asked for."""
    if spec is None or spec.overlaps:
        return lambda batch_size: {0} | controller.tiers_at(batch_size)
    return lambda batch_size: set(range(max(controller.tiers_at(batch_size)) + 1))


class RoundTimer:
    """Times rounds of dummy requests, with what a draft model drafts for them before. limits: of
    the contexts that these requests have, on a GPU and where there is room for them."""

    def __init__(
        self,
        runner: RoundRunner,
        shapes: DraftShapes,
        dummy_slot: int,
        device: torch.device,
        limits: ContextLimits,
    ) -> None:
        self._runner, self._limits = runner, limits
        self._shapes = shapes
        self._place = dummy_slot, device

    def measure(
        self, controller: AdaptiveController, sizes: Sequence[int], *, is_shown: bool = True
    ) -> MeasuredRoundTimes:
        """Round times by batch size and tier. With graphs, of the tiers that the controller may ask
        for at a size; without, all of them, since the sizes between are interpolated."""
        has_graphs = self._runner.graphs is not None
        seconds = {}
        with progress("round times", len(sizes), "batch sizes", every=5, is_shown=is_shown) as bar:
            for size in sizes:
                tiers = controller.tiers_at(size) if has_graphs else controller.tiers
                seconds[size] = self._row(size, tiers)
                bar.advance()
        return MeasuredRoundTimes(seconds, has_contexts=has_graphs)

    def _row(self, size: int, tiers: Sequence[int] | set[int]) -> dict[int, float]:
        """Every tier twice, in mirrored order, so that a drifting clock favours none."""
        keys = {tier: GraphKey(size, self._shapes.of(tier), False) for tier in sorted(tiers)}
        first = {tier: self._seconds(key) for tier, key in keys.items()}
        second = {tier: self._seconds(key) for tier, key in reversed(keys.items())}
        row = {tier: (time + second[tier]) / 2 for tier, time in first.items()}
        return row if self._runner.graphs is not None else without_outliers(row, self._shapes)

    def _seconds(self, key: GraphKey) -> float:
        runner = self._runner
        seconds = runner.seconds_with_contexts(key, self._limits)
        if seconds is None:
            seconds = runner.seconds(key, *self._place)
        return seconds + runner.round_end.seconds_before(key, *self._place)


def without_outliers(row: Mapping[int, float], shapes: DraftShapes) -> dict[int, float]:
    """Host-timed rounds by tier. Other work on the machine only adds time, and neither fewer drafts
    nor fewer steps ever take longer: a time above that of a larger shape is replaced by it."""

    def contains(larger: int, tier: int) -> bool:
        one, other = shapes.of(larger), shapes.of(tier)
        return one.depth >= other.depth and one.rows_each >= other.rows_each

    return {tier: min(row[each] for each in row if contains(each, tier)) for tier in row}
