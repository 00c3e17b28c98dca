"""Chooses the tier of every round before drafting, and observes the result after verification.

It routes batch sizes and context lengths to slots, holds the limits over what a slot's policy
chooses, and shows what was decided. A tier is what a round may have (`DraftShapes`): a draft
length, or where there are trees to choose from a number above the longest length. Pure Python: what
a tier needs on the device is prepared for all of `tiers` at start-up."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tllm_spec.config.adaptive_config import (
    AdaptiveConfig,
    CostModelOptions,
    EmaOptions,
    SlotOptions,
)
from tllm_spec.config.draft_len_schedule import draft_len_table
from tllm_spec.config.draft_shape import MAX_WHOLE_BATCH, DraftShapes
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot
from tllm_spec.executor.speculative.draft_length.decisions import DecisionLog, ObservedRound
from tllm_spec.executor.speculative.draft_length.draft_len_table import (
    NO_LIMIT,
    AcceptanceGate,
    DraftLenTable,
)
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.executor.speculative.draft_length.estimates import estimate_of, ladder_of
from tllm_spec.executor.speculative.draft_length.round_times import (
    ASSUMED_TIMES,
    CorrectedRoundTimes,
    MeasuredRoundTimes,
)

if TYPE_CHECKING:  # it loads torch
    from tllm_spec.config.speculative_config import DecodingBaseConfig

TierPolicy = AdaptiveSpeculativeParams | CostModelSlot
CONTEXT_MARGIN = 0.125  # relative change of the average context that does not count


@dataclass
class ContextBucket:
    """Rounds of requests with `context_len` tokens or more on average. Slots ascend by lower
    bound."""

    slots: Sequence[TierPolicy]
    times: CorrectedRoundTimes
    context_len: int
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
        table: DraftLenTable | None = None,
        buckets: Sequence[ContextBucket] = (),
        *,
        tiers: Iterable[int] = (),
        graph_batch_sizes: Iterable[int] | None = None,
        log: DecisionLog | None = None,
        name: Callable[[int], int | str] = lambda tier: tier,
    ) -> None:
        """buckets: none where every round has the longest drafts of the table. tiers: of their
        slots. name: of a tier, for people."""
        self._table, self._buckets, self.context_len = table or DraftLenTable(), buckets, 0
        self._context_lens = [bucket.context_len for bucket in buckets]
        self._bounds = [slot.lower_bound for slot in buckets[0].slots] if buckets else []
        self._graph_batch_sizes = sorted(graph_batch_sizes or ())
        self._log, self._name = log or DecisionLog(), name
        self.tiers = tuple(sorted({*tiers, *self._table.reachable}))

    @classmethod
    def from_config(
        cls,
        config: Mapping[Any, Any] | str | AdaptiveConfig,
        *,
        graph_batch_sizes: Iterable[int] | None = None,
        initial_steps: int | None = None,
        round_times: MeasuredRoundTimes | None = None,
        table: DraftLenTable | None = None,
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
        tiers = sorted(_tiers_of(config, shapes))
        slots = list(config.slots)
        shared_from = 0 if shapes.has_trees else MAX_WHOLE_BATCH + 1  # batch size
        if shapes.budgeted_tiers and slots[-1][0] < shared_from:
            slots.append((shared_from, slots[-1][1]))

        def bucket(context_len: int) -> ContextBucket:
            times = CorrectedRoundTimes(round_times or ASSUMED_TIMES, tiers)
            record = partial(log.record, context_len=context_len)

            def slot(low: int, options: SlotOptions) -> TierPolicy:
                if isinstance(options, EmaOptions):
                    return AdaptiveSpeculativeParams(low, options, record, first, config.compat)
                shares_rows = bool(shapes.budgeted_tiers) and low >= shared_from
                estimate = estimate_of(options, shapes, shares_rows=shares_rows)
                return CostModelSlot(low, estimate, options, times, shapes, record)

            return ContextBucket([slot(*each) for each in slots], times, context_len)

        return cls(
            table,
            [bucket(context_len) for context_len in (0, *config.context_buckets)],
            tiers=tiers,
            graph_batch_sizes=graph_batch_sizes,
            log=log,
            name=shapes.name,
        )

    @classmethod
    def fixed(cls, tier: int) -> "AdaptiveController":
        """Every round has this tier."""
        return cls(DraftLenTable({0: tier}))

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
        most = self._table.max_tier(batch_size)
        padded, slot = self._slot_at(batch_size, self.context_len)
        return slot.tier_for(padded, most) if slot else most

    def tiers_at(self, batch_size: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        most = self._table.max_tier_open(batch_size)
        padded, slot = self._slot_at(batch_size, 0)
        tiers = slot.reachable(padded, most) if slot else {most}
        return tiers | {0} if self._table.has_gate else tiers

    def observe(self, observed: ObservedRound) -> bool:
        """Whether the tier changed for this batch size."""
        batch_size, num_drafted = observed.batch_size, observed.num_drafted
        max_tier = self._table.max_tier(batch_size)
        padded, slot = self._slot_at(batch_size, observed.context_len)
        if num_drafted is None:
            tier = observed.verified_tier
            if tier is None:
                tier = slot.tier_for(padded, max_tier) if slot else max_tier
            num_drafted = tier * len(observed.num_accepted)
        self._table.observe(observed.num_accepted, num_drafted)
        return slot is not None and slot.observe(observed, padded, max_tier)

    @property
    def compares_times(self) -> bool:
        """Whether round times matter to what it decides."""
        slots = [slot for bucket in self._buckets for slot in bucket.slots]
        return any(isinstance(slot, CostModelSlot) for slot in slots)

    def round_seconds(self, batch_size: int) -> dict[str, float]:
        """Expected seconds of a round of so many requests, by the name of the tier."""
        padded, _ = self._slot_at(batch_size, 0)
        row = self._buckets[0].times.row(padded)
        return {str(self._name(tier)): seconds for tier, seconds in row.items()}

    def _slot_at(self, batch_size: int, context_len: int) -> tuple[int, TierPolicy | None]:
        """The padded batch size and its slot, if there are slots."""
        if not self._buckets:
            return batch_size, None
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
        slots = {
            bucket.named(slot.lower_bound): slot.state()
            for bucket in buckets
            for slot in bucket.slots
        }
        return {
            "draft_lens": list(map(name, self.tiers)),
            "slots": slots or {"1": {"steps": self.tiers[-1]}},
            "limits": self._table.state(),
            "decisions": self._log.state(),
            "round_ms": {
                bucket.named(size): row
                for bucket in buckets
                for size, row in bucket.times.state(name).items()
            },
        }


def _tiers_of(config: AdaptiveConfig, shapes: DraftShapes) -> set[int]:
    """All that some slot may choose."""
    cost_models = [own for _, own in config.slots if isinstance(own, CostModelOptions)]
    whole = [tier for own in cost_models for tier in ladder_of(own, shapes)]
    return {*config.draft_lens, *whole, *shapes.budgeted_tiers}


def controller_for(
    spec: "DecodingBaseConfig | None",
    *,
    graph_batch_sizes: Iterable[int] | None = None,
    round_times: MeasuredRoundTimes | None = None,
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
    fixed = spec.max_draft_len if spec.adaptive is None else None
    table = DraftLenTable(
        draft_len_table(fixed, spec.draft_len_schedule, spec.max_concurrency),
        gate=gate,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        tier_within=spec.shapes.tier_within,
    )
    if spec.adaptive is None:
        return AdaptiveController(table)
    return AdaptiveController.from_config(
        spec.adaptive,
        graph_batch_sizes=graph_batch_sizes,
        initial_steps=initial_steps,
        round_times=round_times,
        table=table,
        shapes=spec.shapes,
    )
