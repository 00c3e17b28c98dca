"""Chooses the tier of every round before drafting, and observes the result after verification.

It routes batch sizes to slots, holds the limits over what a slot's policy chooses, and shows what
was decided. A tier is what a round may have (`DraftShapes`): a draft length, or where there are
trees to choose from a number above the longest length. Pure Python: what a tier needs on the device
is prepared for all of `tiers` at start-up."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tllm_spec.config.adaptive_config import AdaptiveConfig, EmaOptions, SlotOptions
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.verify_budget import MAX_WHOLE_BATCH
from tllm_spec.executor.speculative.draft_length.budget_slot import BudgetSlot
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot, ladder_of
from tllm_spec.executor.speculative.draft_length.decision_log import DecisionLog
from tllm_spec.executor.speculative.draft_length.draft_len_limits import DraftLenLimits
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.executor.speculative.draft_length.round_times import (
    AssumedRoundTimes,
    CorrectedRoundTimes,
    RoundTimes,
)
from tllm_spec.executor.speculative.draft_length.tier_policy import (
    FixedTier,
    ObservedRound,
    TierPolicy,
)


class AdaptiveController:
    """Chooses the tier of every round. A batch is padded to the next of
    `graph_batch_sizes`, then belongs to the slot with the largest lower bound not above that, or to
    the first slot. `slots` ascend by lower bound."""

    def __init__(
        self,
        slots: Sequence[TierPolicy],
        *,
        tiers: Iterable[int],
        graph_batch_sizes: Iterable[int] | None = None,
        limits: DraftLenLimits | None = None,
        log: DecisionLog | None = None,
        times: CorrectedRoundTimes | None = None,
        name: Callable[[int], int | str] = lambda tier: tier,
    ) -> None:
        """name: of a tier, for people."""
        self._slots = slots
        self._bounds = [slot.lower_bound for slot in slots]
        self._graph_batch_sizes = sorted(graph_batch_sizes or ())
        self._limits = limits or DraftLenLimits()
        self._log, self._times, self._name = log or DecisionLog(), times, name
        # By batch size: padded, and its slot. Looked up twice a round.
        self._slot_of: dict[int, tuple[int, TierPolicy]] = {}
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
        times = CorrectedRoundTimes(round_times or AssumedRoundTimes(), tiers)

        def slot(lower_bound: int, options: SlotOptions) -> TierPolicy:
            if isinstance(options, EmaOptions):
                return AdaptiveSpeculativeParams(lower_bound, options, log, first, config.compat)
            if shapes.budgeted_tiers and lower_bound > MAX_WHOLE_BATCH:
                return BudgetSlot(lower_bound, options, log, times, shapes)
            return CostModelSlot(lower_bound, options, log, times, shapes)

        slots = list(config.slots)
        if shapes.budgeted_tiers and slots[-1][0] <= MAX_WHOLE_BATCH:
            slots.append((MAX_WHOLE_BATCH + 1, slots[-1][1]))
        return cls(
            [slot(*each) for each in slots],
            tiers=tiers,
            graph_batch_sizes=graph_batch_sizes,
            limits=limits,
            log=log,
            times=times,
            name=shapes.name,
        )

    @classmethod
    def fixed(cls, draft_len: int, *, limits: DraftLenLimits | None = None) -> "AdaptiveController":
        """Without `adaptive`: one draft length, and the limits."""
        return cls([FixedTier(draft_len)], tiers=[draft_len], limits=limits)

    def tier_for(self, batch_size: int) -> int:
        """The tier of a round of `batch_size` generating requests; 0 = plain decoding."""
        padded, slot = self._slot_of.get(batch_size) or self._find_slot(batch_size)
        return slot.tier_for(padded, self._limits.max_tier(batch_size))

    def tiers_at(self, batch_size: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        padded, slot = self._find_slot(batch_size)
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
    ) -> bool:
        """What a round brought. Returns whether the tier changed for this batch size.

        num_accepted: of every request that was drafted for, which may be fewer than the batch.
        verified_tier: of the drafts that were verified, e.g. 0 in the round after plain decoding;
        None: the present one. seconds: None if the round's time says nothing. num_requests: whose
        results count, if some had ended already. num_drafted: drafts really proposed, if that is
        not `verified_tier` for each of num_accepted. asked_draft_len: what the drafter was asked
        for, if it had fewer than that. ranks: of every request of num_accepted, as `path_ranks`
        shows them. expected: as `RoundOutcome`."""
        padded, slot = self._slot_of.get(batch_size) or self._find_slot(batch_size)
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
        return any(isinstance(slot, CostModelSlot) for slot in self._slots)

    def round_seconds(self, batch_size: int) -> dict[str, float]:
        """Expected seconds of a round of so many requests, by the name of the tier."""
        assert self._times is not None
        padded, _ = self._find_slot(batch_size)
        return {str(self._name(tier)): each for tier, each in self._times.row(padded).items()}

    def _find_slot(self, batch_size: int) -> tuple[int, TierPolicy]:
        sizes = self._graph_batch_sizes
        at = bisect_left(sizes, batch_size)
        padded = sizes[at] if at < len(sizes) else batch_size
        slot = self._slots[max(0, bisect_right(self._bounds, padded) - 1)]
        self._slot_of[batch_size] = padded, slot
        return padded, slot

    def state(self) -> dict[str, Any]:
        """Everything that decisions rest on, as plain values for /server_info."""
        return {
            "draft_lens": list(map(self._name, self.tiers)),
            "slots": {str(slot.lower_bound): slot.state() for slot in self._slots},
            "limits": self._limits.state(),
            "decisions": self._log.state(),
            "round_ms": self._times.state(self._name) if self._times else {},
        }
