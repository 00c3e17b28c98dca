"""Chooses the tier of every round before drafting, and observes the result after verification.

It routes batch sizes and context lengths to slots, holds the limits over what a slot's policy
chooses, and shows what was decided. A tier is what a round may have (`DraftShapes`): a draft
length, or where there are trees to choose from a number above the longest length. Pure Python: what
a tier needs on the device is prepared for all of `tiers` at start-up."""

import logging
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tllm_spec.config.adaptive_config import (
    AdaptiveConfig,
    CostModelOptions,
    EmaOptions,
    SlotOptions,
)
from tllm_spec.config.draft_shape import MAX_WHOLE_BATCH, DraftShapes, draft_len_table
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot
from tllm_spec.executor.speculative.draft_length.decisions import DecisionLog, ObservedRound
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.executor.speculative.draft_length.estimates import estimate_of, ladder_of
from tllm_spec.executor.speculative.draft_length.round_times import (
    ASSUMED_TIMES,
    CorrectedRoundTimes,
    RoundTimes,
)

if TYPE_CHECKING:  # it loads torch
    from tllm_spec.config.speculative_config import DecodingBaseConfig


# The longest draft length of a round, by its batch size: from a fixed length, a schedule or a
# concurrency limit, less where the token budget of a forward has no room, none while the
# acceptance gate is closed. A policy chooses within it.


logger = logging.getLogger(__name__)

NO_LIMIT = sys.maxsize
# While more requests may join, windows leave one row in so many to contexts. Otherwise drafts could
# keep every prompt waiting.
CONTEXT_SHARE = 4
# A gate stays closed for so many windows of rounds, then opens for one: drafts in 1% of the rounds.
CLOSED_WINDOWS = 99


class DraftLenTable:
    """The largest tier that a round may have. by_batch_size: see `draft_len_table`.
    max_num_tokens: rows of a forward. All windows of a round fit into it; in batches below
    `max_batch_size` they leave room for contexts. tier_within: the last tier whose windows, and
    those of all before it, have at most so many rows.

    gate: a threshold and a number of rounds. It closes when the share of accepted drafts over the
    last so many rounds with drafts is below the threshold. TensorRT-LLM never opens it again; here
    it opens for one window of rounds in 100. None: it never closes."""

    def __init__(
        self,
        by_batch_size: Mapping[int, int] = MappingProxyType({}),
        *,
        gate: tuple[float, int] | None = None,
        max_num_tokens: int = NO_LIMIT,
        max_batch_size: int = 0,
        tier_within: Callable[[int], int] = lambda num_rows: max(0, num_rows - 1),
    ) -> None:
        self._rows = sorted(by_batch_size.items())
        self._max_num_tokens, self._max_batch_size = max_num_tokens, max_batch_size
        self._tier_within = tier_within
        self.max_tier_open = cache(self._most_open)  # it is asked in every round
        self.has_gate, (self._threshold, self._window_size) = gate is not None, gate or (0.0, 0)
        self._window: deque[tuple[int, int]] = deque(maxlen=self._window_size)
        self._closed_rounds = 0

    @property
    def is_closed(self) -> bool:
        """Whether the gate is."""
        return self._closed_rounds > 0

    def max_tier(self, batch_size: int) -> int:
        """The largest tier of a round with `batch_size` generating requests."""
        return 0 if self._closed_rounds else self.max_tier_open(batch_size)

    def _most_open(self, batch_size: int) -> int:
        """The same while the gate is open."""
        room = NO_LIMIT
        if self._max_num_tokens != NO_LIMIT:
            rows = self._max_num_tokens
            if batch_size < self._max_batch_size:
                rows = rows_with_contexts(rows)
            room = self._tier_within(rows // batch_size)
        found = [most for size, most in self._rows if size <= batch_size]
        return min([room, *found[-1:]])

    def forget(self) -> None:
        """Opens the gate, and drops what it has seen."""
        self._window.clear()
        self._closed_rounds = 0

    def observe(self, num_accepted: Sequence[int], num_drafted: int) -> None:
        """num_drafted: drafts of the whole round. Rounds without drafts count only while the gate
        is closed."""
        if self._closed_rounds:
            self._closed_rounds -= 1  # includes rounds that were in flight when the gate closed
            if not self._closed_rounds:
                logger.info("acceptance gate: opens for %d rounds of drafts", self._window_size)
        elif num_drafted and self.has_gate:
            self._window.append((sum(num_accepted), num_drafted))
            if len(self._window) == self._window_size and self.rate < self._threshold:
                logger.info(
                    "acceptance gate: closes; acceptance rate %.3f of %d rounds is below %g",
                    *(self.rate, self._window_size, self._threshold),
                )
                self._closed_rounds = CLOSED_WINDOWS * self._window_size
                self._window.clear()

    @property
    def rate(self) -> float:
        """Accepted drafts / drafts in the gate's window; 0 when it is empty."""
        return sum(accepted for accepted, _ in self._window) / max(
            1, sum(drafted for _, drafted in self._window)
        )

    @property
    def reachable(self) -> set[int]:
        """Tiers of the table, whether or not a ladder has them."""
        return {most for _, most in self._rows} | ({0} if self.has_gate else set())

    def state(self) -> dict[str, Any]:
        gate = {"is_closed": self.is_closed, "acceptance_rate": round(self.rate, 4)}
        schedule = {size: most for size, most in self._rows if size}
        return {"draft_len_schedule": schedule or None, "gate": gate if self.has_gate else None}


def rows_with_contexts(max_num_tokens: int) -> int:
    """Rows that windows may use in a round with fewer requests than the largest batch."""
    return max_num_tokens - max_num_tokens // CONTEXT_SHARE


TierPolicy = AdaptiveSpeculativeParams | CostModelSlot
CONTEXT_MARGIN = 0.125  # relative change of the average context that does not count


@dataclass
class ContextBucket:
    """Rounds of requests with `context_len` tokens or more on average. Slots ascend by lower
    bound."""

    new_slots: Callable[[], Sequence[TierPolicy]]
    """Slots that have seen nothing."""
    times: CorrectedRoundTimes
    context_len: int
    # By batch size: padded, and its slot. Looked up twice a round.
    slot_of: dict[int, tuple[int, TierPolicy]] = field(default_factory=dict)
    slots: Sequence[TierPolicy] = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops learned acceptance. Round times stay."""
        self.slots = self.new_slots()
        self.slot_of.clear()

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
        slots. name: of a tier, for people. `knows_contexts`: whether context lengths matter to
        what it decides."""
        self.knows_contexts = len(buckets) > 1
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
        round_times: RoundTimes | None = None,
        table: DraftLenTable | None = None,
        shapes: DraftShapes | None = None,
    ) -> "AdaptiveController":
        """initial_steps: the first draft length of `strategy: ema`, where a ladder has it (SGLang's
        launch value); None: the middle of the ladders. round_times: for the cost model; None:
        assumed. shapes: of the tiers; None: a chain of every length. Raises ValueError for a bad
        configuration."""
        if not isinstance(config, AdaptiveConfig):
            config = AdaptiveConfig.parse(config)
        lengths = config.draft_lens  # it begins in the middle if no option says otherwise
        first = lengths[len(lengths) // 2] if initial_steps is None else initial_steps
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

            return ContextBucket(lambda: [slot(*each) for each in slots], times, context_len)

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

    def forget(self) -> None:
        """Drops what it knows of acceptance: the weights have changed."""
        self._table.forget()
        for bucket in self._buckets:
            bucket.forget()

    def note_context(self, context_len: int) -> None:
        """Average tokens of the requests that `tier_for` is asked about next. A small change does
        not count: requests that come and go around a bound would switch the tier, and a round
        after a switch has the drafts of the tier before."""
        if abs(context_len - self.context_len) > CONTEXT_MARGIN * self.context_len:
            self.context_len = context_len

    def tier_for(self, batch_size: int) -> int:
        """The tier of a round of `batch_size` generating requests; 0 = plain decoding."""
        most = self._table.max_tier(batch_size)
        if not self._buckets:
            return most
        padded, slot = self._slot_at(batch_size, self.context_len)
        return slot.tier_for(padded, most)

    def tiers_at(self, batch_size: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        tiers = {self._table.max_tier_open(batch_size)}
        if self._buckets:
            padded, slot = self._slot_at(batch_size, 0)
            tiers = slot.reachable(padded, *tiers)
        return tiers | {0} if self._table.has_gate else tiers

    def observe(self, observed: ObservedRound) -> bool:
        """Whether the tier changed for this batch size."""
        batch_size, num_drafted = observed.batch_size, observed.num_drafted
        max_tier, padded, slot = self._table.max_tier(batch_size), batch_size, None
        if self._buckets:
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

    def _slot_at(self, batch_size: int, context_len: int) -> tuple[int, TierPolicy]:
        """The padded batch size and its slot."""
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
        gate = spec.acceptance_rate_threshold, spec.acceptance_rate_window_size
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
