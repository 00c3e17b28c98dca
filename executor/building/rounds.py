"""The steps before the first round, in the order in which build.py calls them: GEMMs are tuned,
CUDA graphs captured, kernels warmed up, and rounds timed."""

import logging
from collections.abc import Mapping, Sequence

import torch

from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.warm_up import WarmUp
from tllm_spec.executor.engine.memory_plan import TorchModel
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey, GraphPool
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.models.linear import tune_linears
from tllm_spec.progress import progress

logger = logging.getLogger(__name__)

# Batch sizes whose rounds are timed where there are no graphs; others are interpolated.
EAGER_SIZES = (1, 2, 4, 8, 16)


def graph_sizes(plan: BuildPlan, runner: RoundRunner) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs; none where there can be no graphs."""
    if not plan.graph_sizes or plan.device.type != "cuda":
        return ()
    if not runner.engine.attention.supports_graphs:
        logger.warning(
            "no CUDA graphs: attn_backend %s needs lengths on the host", plan.args.attn_backend
        )
        return ()
    return plan.graph_sizes


def tune_gemms(plan: BuildPlan, models: Sequence[TorchModel], keys: Sequence[GraphKey]) -> None:
    """Tunes the models' GEMMs for the numbers of rows that rounds have."""
    if plan.device.type == "cuda":
        plan.begin("GEMMs")
    if plan.args.deterministic:
        return
    # Rows of all windows, one row per request, full chunks of contexts, and a short prompt.
    row_counts = {rows for key in keys for rows in key.row_counts}
    row_counts |= {plan.args.max_num_tokens, plan.args.max_num_tokens // 8}
    tune_linears(models, row_counts, plan.device, plan.communicator)


def capture_graphs(plan: BuildPlan, runner: RoundRunner, keys: list[GraphKey]) -> None:
    """Captures the graphs of contexts, and those of the rounds in `keys`."""
    if plan.device.type == "cuda":
        plan.begin("CUDA graphs")
    pool = GraphPool(plan.device, plan.communicator.minimum)
    plan.communicator.before_close(pool.release)
    # First, since the graphs of contexts need the most memory.
    runner.capture_contexts(plan.context_rows, plan.slots.dummy_slot, pool)
    if keys:
        assert plan.args.cuda_graph_config is not None
        pads = plan.args.cuda_graph_config.enable_padding
        logger.info("capturing the CUDA graphs of %d kinds of rounds", len(keys))
        runner.capture_graphs(keys, plan.slots.dummy_slot, plan.device, pads=pads, pool=pool)


def warm_up(plan: BuildPlan, runner: RoundRunner, keys: Sequence[GraphKey]) -> None:
    """Runs rounds of dummy requests, which compile and load the kernels of a GPU."""
    if plan.device.type == "cuda":
        rows, dummy_slot = plan.args.max_num_tokens, plan.slots.dummy_slot
        WarmUp(runner, dummy_slot, max_num_tokens=rows, max_len=plan.max_seq_len).run(keys)


def time_rounds(
    plan: BuildPlan, runner: RoundRunner, sizes: Sequence[int]
) -> MeasuredRoundTimes | None:
    """How long rounds take with each draft length that the controller may ask for; None if it does
    not compare times. sizes: batch sizes of CUDA graphs."""
    controller = plan.controller()
    if not controller.compares_times:
        return None
    plan.begin("round times")
    longest = plan.shapes.longest
    room = min(plan.slots.max_batch_size, plan.args.max_num_tokens // longest.window)
    timed = [size for size in sizes or EAGER_SIZES if size <= max(room, 1)]
    timer = RoundTimer(
        runner,
        plan.shapes,
        plan.slots.dummy_slot,
        plan.device,
        ContextLimits(plan.max_seq_len, 1 + plan.overshoot),
    )
    return timer.measure(controller, timed, is_shown=plan.mapping.rank == 0)


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
        return seconds + runner.drafter.seconds_before(key, *self._place)


def without_outliers(row: Mapping[int, float], shapes: DraftShapes) -> dict[int, float]:
    """Host-timed rounds by tier. Other work on the machine only adds time, and neither fewer drafts
    nor fewer steps ever take longer: a time above that of a larger shape is replaced by it."""

    def contains(larger: int, tier: int) -> bool:
        one, other = shapes.of(larger), shapes.of(tier)
        return one.depth >= other.depth and one.rows_each >= other.rows_each

    return {tier: min(row[each] for each in row if contains(each, tier)) for tier in row}
