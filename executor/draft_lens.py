"""Draft lengths put together: the controller that a configuration asks for, the lengths that need CUDA graphs, and how
long rounds of each take.
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from tllm_spec.adaptive_config import MarkOptions
from tllm_spec.executor.round_runner import RoundRunner
from tllm_spec.executor.slot_graphs import GraphKey
from tllm_spec.executor.speculative.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_len_limits import NO_LIMIT, AcceptanceGate, DraftLenLimits
from tllm_spec.executor.speculative.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.modes import DraftModel, Speculation
from tllm_spec.executor.speculative.round_times import MeasuredRoundTimes, RoundTimes
from tllm_spec.executor.speculative.unverified_drafts import UnverifiedDrafts
from tllm_spec.executor.stand_in_contexts import ContextLimits
from tllm_spec.speculative_config import DecodingBaseConfig

# Batch sizes whose rounds are timed where there are no graphs; others are on a line with these.
EAGER_SIZES = (1, 2, 4, 8, 16)


def controller_for(
    spec: DecodingBaseConfig | None,
    *,
    graph_batch_sizes: Iterable[int] | None = None,
    round_times: RoundTimes | None = None,
    max_num_tokens: int = NO_LIMIT,
    max_batch_size: int = 0,
) -> AdaptiveController:
    """Without speculation: of plain decoding."""
    if spec is None:
        return AdaptiveController.fixed(0)
    gate = None
    if spec.acceptance_rate_threshold is not None and spec.acceptance_rate_window_size is not None:
        gate = AcceptanceGate(spec.acceptance_rate_threshold, spec.acceptance_rate_window_size)
    limits = DraftLenLimits(
        max_concurrency=spec.max_concurrency,
        schedule=spec.draft_len_schedule,
        gate=gate,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
    )
    if spec.adaptive is None:
        # Drafts that are made inside the forward cost the same for a request that pauses.
        patience = None if spec.overlaps else spec.max_rejected_rounds
        return AdaptiveController.fixed(
            spec.max_draft_len, limits=limits, marks=MarkOptions(mark_patience=patience)
        )
    return AdaptiveController.from_config(
        spec.adaptive,
        graph_batch_sizes=graph_batch_sizes,
        round_times=round_times,
        limits=limits,
        marks=MarkOptions(mark_patience=None) if spec.overlaps else None,
    )


def draft_lens_of_rounds(
    controller: AdaptiveController, spec: DecodingBaseConfig | None, draft: DraftModel | None
) -> Callable[[int], set[int]]:
    """Draft lengths that rounds of a batch size can have: drafters outside the forward may come with fewer drafts."""
    if spec is None or (draft is not None and not draft.drafts_before_the_forward):
        return controller.draft_lens_at
    if draft is not None and draft.follows_a_round_later:
        return lambda batch_size: {0} | controller.draft_lens_at(batch_size)
    return lambda batch_size: set(range(max(controller.draft_lens_at(batch_size)) + 1))


def watch_unverified(
    controller: AdaptiveController, spec: DecodingBaseConfig | None, speculation: Speculation
) -> None:
    """Lets a controller that estimates acceptance learn from rounds without drafts, where that costs the device
    nothing."""
    if spec is not None and spec.adaptive is not None and speculation.watch and controller.compares_times:
        share = spec.adaptive.times.unverified_time_share
        controller.expect_unverified()
        speculation.watch(UnverifiedDrafts(controller.learn, share))


def measure_round_times(
    runner: RoundRunner,
    controller: AdaptiveController,
    sizes: Iterable[int],
    dummy_slot: int,
    device: torch.device,
    draft_cost: float,
    drafter: GraphDrafter | None = None,
    limits: ContextLimits | None = None,
) -> MeasuredRoundTimes:
    """Greedy rounds of dummies, by batch size and draft length. What is drafted outside the target's forward is timed
    where `drafter` has graphs of it; without them each draft takes `draft_cost` plain rounds. Without graphs every
    length is timed, those that a limit forbids at a size too: smaller batches are on a line with them. Graphs end where
    a limit begins, and their dummies have empty contexts; what contexts add to each length is measured beside it
    (`limits`: of theirs; None: not measured)."""
    is_timed = drafter is not None and drafter.graphs is not None
    assumed = 0.0 if is_timed else draft_cost
    seconds: dict[int, dict[int, float]] = {}
    added: dict[int, dict[int, float]] = {}
    for size in sizes:
        wanted = controller.draft_lens if runner.graphs is None else controller.draft_lens_at(size)
        lengths = sorted({0, *wanted} if assumed else wanted)
        row = {steps: runner.seconds(GraphKey(size, steps, False), dummy_slot, device) for steps in lengths}
        if runner.graphs is None:
            row = without_outliers(row)
        a_draft = assumed * row[0] if assumed else 0.0
        seconds[size] = {
            steps: time + steps * a_draft + _drafting_seconds(drafter, GraphKey(size, steps, False))
            for steps, time in row.items()
        }
        if limits is not None:
            longer = {s: runner.seconds_with_contexts(GraphKey(size, s, False), limits) for s in lengths}
            added[size] = {steps: time - row[steps] for steps, time in longer.items() if time is not None}
    is_complete = bool(added) and all(len(added[size]) == len(row) for size, row in seconds.items())
    return MeasuredRoundTimes(
        seconds, of_empty_contexts=runner.graphs is not None, contexts=added if is_complete else None
    )


def _drafting_seconds(drafter: GraphDrafter | None, key: GraphKey) -> float:
    return 0.0 if drafter is None else drafter.seconds(key)


def without_outliers(row: Mapping[int, float]) -> dict[int, float]:
    """Times by draft length as the host took them: other work on the machine only adds to a time, and fewer drafts do
    not take longer than more, so a time above that of a longer length says nothing."""
    lengths = sorted(row)
    return {length: min(row[longer] for longer in lengths[place:]) for place, length in enumerate(lengths)}
