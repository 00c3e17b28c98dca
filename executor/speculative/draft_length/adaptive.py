"""Chooses the tier of every round before drafting, and observes the result after verification.

It routes batch sizes and context lengths to slots, holds the limits over what a slot's policy
chooses, and shows what was decided. A tier is what a round may have (`DraftShapes`): a draft
length, or where there are trees to choose from a number above the longest length. Pure Python: what
a tier needs on the device is prepared for all of `tiers` at start-up."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tllm_spec.config.adaptive_config import AdaptiveConfig, EmaOptions, SlotOptions
from tllm_spec.config.draft_len_schedule import draft_len_limits
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.verify_budget import MAX_WHOLE_BATCH
from tllm_spec.executor.speculative.draft_length.cost_model import (
    BudgetSlot,
    CostModelSlot,
    ladder_of,
)
from tllm_spec.executor.speculative.draft_length.draft_len_limits import (
    NO_LIMIT,
    AcceptanceGate,
    DraftLenLimits,
)
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.executor.speculative.draft_length.round_times import (
    AssumedRoundTimes,
    CorrectedRoundTimes,
    RoundTimes,
)
from tllm_spec.executor.speculative.draft_length.tier_policy import (
    BucketLog,
    DecisionLog,
    FixedTier,
    ObservedRound,
    TierPolicy,
)

if TYPE_CHECKING:
    from tllm_spec.config.speculative_config import DecodingBaseConfig

CONTEXT_MARGIN = 0.125  # relative change of the average context that does not count


@dataclass
class ContextBucket:
    """Rounds of requests with `context_len` tokens or more on average. Slots ascend by lower
    bound."""

    slots: Sequence[TierPolicy]
    times: CorrectedRoundTimes | None = None
    context_len: int = 0
    # By batch size: padded, and its slot. Looked up twice a round.
    slot_of: dict[int, tuple[int, TierPolicy]] = field(default_factory=dict)

    def named(self, number: object) -> str:
        """A slot or batch size of this bucket, as `state` shows it."""
        return f"{number}@{self.context_len}" if self.context_len else str(number)


class AdaptiveController:
    """Chooses the tier of every round. A batch is padded to the next of
    `graph_batch_sizes`, then belongs to the slot with the largest lower bound not above that, or to
    the first slot, of the bucket of `context_len`. `buckets` ascend by context length, from 0
    on."""

    def __init__(
        self,
        buckets: Sequence[ContextBucket],
        *,
        tiers: Iterable[int],
        graph_batch_sizes: Iterable[int] | None = None,
        limits: DraftLenLimits | None = None,
        log: DecisionLog | None = None,
        name: Callable[[int], int | str] = lambda tier: tier,
    ) -> None:
        """name: of a tier, for people."""
        self._buckets, self.context_len = buckets, 0
        self._context_lens = [bucket.context_len for bucket in buckets]
        self._bounds = [slot.lower_bound for slot in buckets[0].slots]
        self._graph_batch_sizes = sorted(graph_batch_sizes or ())
        self._limits = limits or DraftLenLimits()
        self._log, self._name = log or DecisionLog(), name
        self.tiers = tuple(sorted({*tiers, *self._limits.reachable}))

    @classmethod
    def from_config(
        cls,
        config: Mapping[Any, Any] | str | AdaptiveConfig,
        *,
        graph_batch_sizes: Iterable[int] | None = None,
        initial_steps: int | None = None,
        round_times: RoundTimes | None = None,
        limits: DraftLenLimits | None = None,
        shapes: DraftShapes | None = None,
    ) -> "AdaptiveController":
        """initial_steps: the first draft length of `strategy: ema`, where a ladder has it (SGLang's
        launch value); None: the middle of the ladders. round_times: for the cost model; None:
        assumed. shapes: of the tiers; None: a chain of every length. Raises ValueError for a bad
        configuration."""
        if not isinstance(config, AdaptiveConfig):
            config = AdaptiveConfig.parse(config)
        first = config.middle_draft_len if initial_steps is None else initial_steps
        log = DecisionLog()
        shapes = shapes or DraftShapes.chains(config.draft_lens[-1])
        ladders = [ladder_of(options, shapes) for _, options in config.slots]
        tiers = sorted({tier for ladder in ladders for tier in ladder} | {*shapes.budgeted_tiers})
        slots = list(config.slots)
        shared_from = 0 if shapes.has_trees else MAX_WHOLE_BATCH + 1  # batch size
        if shapes.budgeted_tiers and slots[-1][0] < shared_from:
            slots.append((shared_from, slots[-1][1]))

        def bucket(context_len: int) -> ContextBucket:
            own_log = BucketLog(log, context_len) if context_len else log
            times = CorrectedRoundTimes(round_times or AssumedRoundTimes(), tiers)

            def slot(lower_bound: int, options: SlotOptions) -> TierPolicy:
                if isinstance(options, EmaOptions):
                    return AdaptiveSpeculativeParams(
                        lower_bound, options, own_log, first, config.compat
                    )
                if shapes.budgeted_tiers and lower_bound >= shared_from:
                    return BudgetSlot(lower_bound, options, own_log, times, shapes)
                return CostModelSlot(lower_bound, options, own_log, times, shapes)

            return ContextBucket([slot(*each) for each in slots], times, context_len)

        return cls(
            [bucket(context_len) for context_len in (0, *config.context_buckets)],
            tiers=tiers,
            graph_batch_sizes=graph_batch_sizes,
            limits=limits,
            log=log,
            name=shapes.name,
        )

    @classmethod
    def fixed(cls, draft_len: int, *, limits: DraftLenLimits | None = None) -> "AdaptiveController":
        """Without `adaptive`: one draft length, and the limits."""
        return cls([ContextBucket([FixedTier(draft_len)])], tiers=[draft_len], limits=limits)

    @property
    def knows_contexts(self) -> bool:
        """Whether context lengths matter to what it decides."""
        return len(self._buckets) > 1

    def note_context(self, context_len: int) -> None:
        """Average tokens of the requests that `tier_for` is asked about next. A small change does
        not count: requests that come and go around a bound would switch the tier, and a round
        after a switch has the drafts of the tier before."""
        if abs(context_len - self.context_len) > CONTEXT_MARGIN * self.context_len:
            self.context_len = context_len

    def tier_for(self, batch_size: int) -> int:
        """The tier of a round of `batch_size` generating requests; 0 = plain decoding."""
        padded, slot = self._slot_at(batch_size, self.context_len)
        return slot.tier_for(padded, self._limits.max_tier(batch_size))

    def tiers_at(self, batch_size: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        padded, slot = self._slot_at(batch_size, 0)
        tiers = slot.reachable(padded, self._limits.max_tier_open(batch_size))
        return tiers | {0} if self._limits.has_gate else tiers

    def observe(
        self,
        batch_size: int,
        num_accepted: Sequence[int],
        verified_tier: int | None = None,
        seconds: float | None = None,
        *,
        num_requests: int | None = None,
        num_drafted: int | None = None,
        asked_draft_len: int | None = None,
        ranks: Sequence[Sequence[int]] = (),
        expected: Sequence[float] = (),
        context_len: int = 0,
    ) -> bool:
        """What a round brought. Returns whether the tier changed for this batch size.

        num_accepted: of every request that was drafted for, which may be fewer than the batch.
        verified_tier: of the drafts that were verified, e.g. 0 in the round after plain decoding;
        None: the present one. seconds: None if the round's time says nothing. num_requests: whose
        results count, if some had ended already. num_drafted: drafts really proposed, if that is
        not `verified_tier` for each of num_accepted. asked_draft_len: what the drafter was asked
        for, if it had fewer than that. ranks: of every request of num_accepted, as `path_ranks`
        shows them. expected: as `RoundOutcome`. context_len: the attribute when the round was
        chosen."""
        padded, slot = self._slot_at(batch_size, context_len)
        max_tier = self._limits.max_tier(batch_size)
        if num_drafted is None:
            tier = slot.tier_for(padded, max_tier) if verified_tier is None else verified_tier
            num_drafted = tier * len(num_accepted)
        self._limits.observe(num_accepted, num_drafted)
        alive = batch_size if num_requests is None else num_requests
        return slot.observe(
            ObservedRound(
                alive,
                padded,
                num_accepted,
                verified_tier,
                seconds,
                max_tier,
                asked_draft_len,
                ranks,
                expected,
            )
        )

    @property
    def compares_times(self) -> bool:
        """Whether round times matter to what it decides."""
        return any(isinstance(slot, CostModelSlot) for slot in self._buckets[0].slots)

    def round_seconds(self, batch_size: int) -> dict[str, float]:
        """Expected seconds of a round of so many requests, by the name of the tier."""
        times = self._buckets[0].times
        assert times is not None
        padded, _ = self._slot_at(batch_size, 0)
        return {str(self._name(tier)): each for tier, each in times.row(padded).items()}

    def _slot_at(self, batch_size: int, context_len: int) -> tuple[int, TierPolicy]:
        bucket = self._buckets[bisect_right(self._context_lens, context_len) - 1]
        if (found := bucket.slot_of.get(batch_size)) is not None:
            return found
        sizes = self._graph_batch_sizes
        at = bisect_left(sizes, batch_size)
        padded = sizes[at] if at < len(sizes) else batch_size
        slot = bucket.slots[max(0, bisect_right(self._bounds, padded) - 1)]
        bucket.slot_of[batch_size] = padded, slot
        return padded, slot

    def state(self) -> dict[str, Any]:
        """Everything that decisions rest on, as plain values for /server_info."""
        buckets, name = self._buckets, self._name
        times = [(bucket, bucket.times.state(name)) for bucket in buckets if bucket.times]
        return {
            "draft_lens": list(map(self._name, self.tiers)),
            "slots": {
                bucket.named(slot.lower_bound): slot.state()
                for bucket in buckets
                for slot in bucket.slots
            },
            "limits": self._limits.state(),
            "decisions": self._log.state(),
            "round_ms": {
                bucket.named(size): row for bucket, rows in times for size, row in rows.items()
            },
        }


def controller_for(
    spec: "DecodingBaseConfig | None",
    *,
    graph_batch_sizes: Iterable[int] | None = None,
    round_times: RoundTimes | None = None,
    max_num_tokens: int = NO_LIMIT,
    max_batch_size: int = 0,
    initial_steps: int | None = None,
) -> AdaptiveController:
    """None: plain decoding. initial_steps: as `AdaptiveController.from_config`."""
    if spec is None:
        return AdaptiveController.fixed(0)
    gate = None
    if spec.acceptance_rate_threshold is not None and spec.acceptance_rate_window_size is not None:
        gate = AcceptanceGate(spec.acceptance_rate_threshold, spec.acceptance_rate_window_size)
    limits = DraftLenLimits(
        draft_len_limits(spec.draft_len_schedule, spec.max_concurrency),
        gate=gate,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        tier_within=spec.shapes.tier_within,
    )
    if spec.adaptive is None:
        return AdaptiveController.fixed(spec.max_draft_len, limits=limits)
    return AdaptiveController.from_config(
        spec.adaptive,
        graph_batch_sizes=graph_batch_sizes,
        initial_steps=initial_steps,
        round_times=round_times,
        limits=limits,
        shapes=spec.shapes,
    )
