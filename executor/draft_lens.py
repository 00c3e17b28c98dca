"""Draft lengths put together: the controller that a configuration asks for, the lengths that need
CUDA graphs, and how long rounds of each take."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from tllm_spec.adaptive_config import MarkOptions
from tllm_spec.executor.graphs.dummy_contexts import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.draft_len_limits import (
    NO_LIMIT,
    AcceptanceGate,
    DraftLenLimits,
)
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes, RoundTimes
from tllm_spec.executor.speculative.draft_length.unverified_drafts import UnverifiedDrafts
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.modes import DraftModel, Speculation
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
    initial_steps: int | None = None,
) -> AdaptiveController:
    """Without speculation: of plain decoding. initial_steps: as
    `AdaptiveController.from_config`."""
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
        initial_steps=initial_steps,
        round_times=round_times,
        limits=limits,
        marks=MarkOptions(mark_patience=None) if spec.overlaps else None,
    )


def draft_lens_of_rounds(
    controller: AdaptiveController, spec: DecodingBaseConfig | None, draft: DraftModel | None
) -> Callable[[int], set[int]]:
    """Draft lengths that rounds of a batch size can have: 0 where nobody wants drafts, and a
    drafter that is not on the target's pages may come with fewer than it was asked for."""
    if spec is None or (draft is not None and draft.shares_pages):
        return lambda batch_size: {0} | controller.draft_lens_at(batch_size)
    return lambda batch_size: set(range(max(controller.draft_lens_at(batch_size)) + 1))


def watch_unverified(
    controller: AdaptiveController, spec: DecodingBaseConfig | None, speculation: Speculation
) -> None:
    """Lets a controller that estimates acceptance learn from rounds without drafts, where that
    costs the device nothing."""
    if (
        spec is not None
        and spec.adaptive is not None
        and speculation.watch
        and controller.compares_times
    ):
        share = spec.adaptive.times.unverified_time_share
        controller.expect_unverified()
        speculation.watch(UnverifiedDrafts(controller.learn, share))


def measure_round_times(
    runner: RoundRunner,
    controller: AdaptiveController,
    sizes: Sequence[int],
    dummy_slot: int,
    device: torch.device,
    drafter: GraphDrafter | None = None,
    limits: ContextLimits | None = None,
) -> MeasuredRoundTimes:
    """Rounds of dummies, by batch size and draft length, and what `drafter` drafts for them outside
    the target's forward. Without graphs every length is timed, those that a limit forbids at a size
    too: smaller batches are on a line with them. Graphs end where a limit begins, and their dummies
    have empty contexts; what contexts add to each length is measured beside it (`limits`: of
    theirs; None: not measured). So is, at a few sizes, what sampling adds."""
    seconds: dict[int, dict[int, float]] = {}
    contexts: dict[int, dict[int, float]] = {}
    sampling: dict[int, dict[int, float]] = {}
    for size in sizes:
        wanted = controller.draft_lens if runner.graphs is None else controller.draft_lens_at(size)
        keys = [GraphKey(size, steps, False) for steps in sorted(wanted)]
        target = _by_length(runner, keys, dummy_slot, device)
        seconds[size] = _sums(target, drafter, keys, dummy_slot, device)
        if size in _few_of(sizes):
            sampled = [replace(key, sampled=True) for key in keys]
            longer = _by_length(runner, sampled, dummy_slot, device)
            longer = _sums(longer, drafter, sampled, dummy_slot, device)
            sampling[size] = {
                steps: max(0.0, longer[steps] - time) for steps, time in seconds[size].items()
            }
        if limits is not None:
            found = {key.draft_len: runner.seconds_with_contexts(key, limits) for key in keys}
            contexts[size] = {
                steps: time - target[steps] for steps, time in found.items() if time is not None
            }
    is_complete = bool(contexts) and all(
        len(contexts[size]) == len(row) for size, row in seconds.items()
    )
    return MeasuredRoundTimes(
        seconds,
        of_empty_contexts=runner.graphs is not None,
        contexts=contexts if is_complete else None,
        sampling=sampling,
    )


def _few_of(sizes: Sequence[int]) -> set[int]:
    """What sampling adds to their rounds is on lines between these."""
    return {sizes[0], sizes[len(sizes) // 2], sizes[-1]}


def _by_length(
    timed: RoundRunner | GraphDrafter,
    keys: Iterable[GraphKey],
    dummy_slot: int,
    device: torch.device,
) -> dict[int, float]:
    """Seconds by draft length."""
    row = {key.draft_len: timed.seconds(key, dummy_slot, device) for key in keys}
    return row if timed.graphs is not None else without_outliers(row)


def _sums(
    target: Mapping[int, float],
    drafter: GraphDrafter | None,
    keys: Iterable[GraphKey],
    dummy_slot: int,
    device: torch.device,
) -> dict[int, float]:
    """The target's rounds and what is drafted before them."""
    if drafter is None:
        return dict(target)
    drafting = _by_length(drafter, keys, dummy_slot, device)
    return {steps: time + drafting[steps] for steps, time in target.items()}


def without_outliers(row: Mapping[int, float]) -> dict[int, float]:
    """Times by draft length as the host took them: other work on the machine only adds to a time,
    and fewer drafts do not take longer than more, so a time above that of a longer length says
    nothing."""
    lengths = sorted(row)
    return {
        length: min(row[longer] for longer in lengths[place:])
        for place, length in enumerate(lengths)
    }
