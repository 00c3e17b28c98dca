"""The draft length of every round: asked before drafting, told what came of it after verification.

It routes batch sizes to slots, holds the limits over what a slot's policy chooses, and shows what
was decided. It is
pure Python and drives no device: what a draft length needs (graphs, buffers) is prepared elsewhere
for all of `draft_lens`."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tllm_spec.adaptive_config import AdaptiveConfig, EmaOptions, MarkOptions, SlotOptions
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot
from tllm_spec.executor.speculative.draft_length.decision_log import DecisionLog
from tllm_spec.executor.speculative.draft_length.draft_len_limits import DraftLenLimits
from tllm_spec.executor.speculative.draft_length.draft_len_policy import (
    DraftLenPolicy,
    FixedSteps,
    ObservedRound,
)
from tllm_spec.executor.speculative.draft_length.ema_policy import AdaptiveSpeculativeParams
from tllm_spec.executor.speculative.draft_length.request_mark import RequestMark
from tllm_spec.executor.speculative.draft_length.round_times import (
    AssumedRoundTimes,
    CorrectedRoundTimes,
    RoundTimes,
    row_name,
)


class AdaptiveController:
    """`slots` ascend by their lower bounds. A batch is padded to the next of `graph_batch_sizes`,
    then belongs to the slot with the largest bound not above that, or to the first.
    `sampled_slots`: the same for rounds in which not all requests are greedy, which take longer,
    and whose drafts are accepted less often; None: they share the others."""

    def __init__(
        self,
        slots: Sequence[DraftLenPolicy],
        *,
        draft_lens: Iterable[int],
        graph_batch_sizes: Iterable[int] | None = None,
        limits: DraftLenLimits | None = None,
        marks: MarkOptions | None = None,
        log: DecisionLog | None = None,
        times: CorrectedRoundTimes | None = None,
        sampled_slots: Sequence[DraftLenPolicy] | None = None,
    ) -> None:
        self._slots, self._sampled_slots = slots, sampled_slots or slots
        self._bounds = [slot.lower_bound for slot in slots]
        self._graph_batch_sizes = sorted(graph_batch_sizes or ())
        self._limits = limits or DraftLenLimits()
        self._marks = marks or MarkOptions()
        self._log, self._times = log or DecisionLog(), times
        # Of the batches that were asked about: padded, and its slot. Looked for twice in every
        # round.
        self._places: dict[tuple[int, bool], tuple[int, DraftLenPolicy]] = {}
        self.draft_lens = tuple(sorted({*draft_lens, *self._limits.reachable}))

    @classmethod
    def from_config(
        cls,
        config: Mapping[Any, Any] | str | AdaptiveConfig,
        *,
        graph_batch_sizes: Iterable[int] | None = None,
        initial_steps: int | None = None,
        round_times: RoundTimes | None = None,
        limits: DraftLenLimits | None = None,
        marks: MarkOptions | None = None,
    ) -> "AdaptiveController":
        """`initial_steps`: the draft length to begin with, where a slot's ladder has it (SGLang's
        launch value).
        `round_times`: as measured at start-up, for the cost model. `marks`: in the place of the
        configuration's. Raises ValueError for a bad configuration."""
        if not isinstance(config, AdaptiveConfig):
            config = AdaptiveConfig.parse(config)
        if initial_steps is None:
            initial_steps = config.launch_steps
        log = DecisionLog()
        source = round_times or AssumedRoundTimes(config.times.assumed_draft_cost)
        times = CorrectedRoundTimes(source, config.draft_lens, config.times)

        def slot(low: int, options: SlotOptions, sampled: bool) -> DraftLenPolicy:
            if isinstance(options, EmaOptions):
                return AdaptiveSpeculativeParams(low, options, log, initial_steps, config.compat)
            return CostModelSlot(low, options, log, initial_steps, times, sampled=sampled)

        compares_times = not isinstance(config.slots[0][1], EmaOptions)
        return cls(
            [slot(*each, sampled=False) for each in config.slots],
            sampled_slots=[slot(*each, sampled=True) for each in config.slots]
            if compares_times
            else None,
            draft_lens=config.draft_lens,
            graph_batch_sizes=graph_batch_sizes,
            limits=limits,
            marks=marks or config.marks,
            log=log,
            times=times,
        )

    @classmethod
    def fixed(
        cls,
        draft_len: int,
        *,
        limits: DraftLenLimits | None = None,
        marks: MarkOptions | None = None,
    ) -> "AdaptiveController":
        """Without `adaptive`: one draft length, and the limits."""
        return cls([FixedSteps(draft_len)], draft_lens=[draft_len], limits=limits, marks=marks)

    def steps_for(self, batch_size: int, sampled: bool = False) -> int:
        """Drafts of each request in a round of `batch_size` generating requests; 0 = plain
        decoding. sampled: not all of them are greedy."""
        padded, slot = self._places.get((batch_size, sampled)) or self._place(batch_size, sampled)
        return slot.steps_for(padded, self._limits.max_steps(batch_size))

    def draft_lens_at(self, batch_size: int) -> set[int]:
        """All that `steps_for` may ever answer."""
        _, slot = self._place(batch_size, sampled=False)  # the others' ladders are the same
        lengths = slot.reachable(self._limits.max_steps_open(batch_size))
        return lengths | {0} if self._limits.has_gate else lengths

    def observe(
        self,
        batch_size: int,
        num_accepted: Sequence[int],
        num_steps: int | None = None,
        seconds: float | None = None,
        *,
        num_requests: int | None = None,
        num_drafted: int | None = None,
        num_asked: int | None = None,
        sampled: bool = False,
        return_seconds: float | None = None,
    ) -> bool:
        """What a round brought. Whether the draft length of the slot changed for this batch size.

        `num_accepted`: accepted drafts of every request that was drafted for, which may be fewer
        than the batch.
        `num_steps`: how many drafts were really verified, e.g. 0 in the round after plain decoding
        whose drafts did not exist yet; None: the present length. `seconds`: the round's, if it had
        no context chunk.
        `num_requests`: those whose results count, where some of the batch had ended already.
        `num_drafted`: drafts that were really proposed for those of `num_accepted`, where that is
        not `num_steps` each. `num_asked`: what the drafter was asked for, if that was more than
        `num_steps` and it had no more. `sampled`: as in `steps_for`.
        `return_seconds`: in the place of `seconds`, of a round that began with a draft model's
        reading what it had missed while nobody drafted."""
        padded, slot = self._places.get((batch_size, sampled)) or self._place(batch_size, sampled)
        max_steps = self._limits.max_steps(batch_size)
        if num_drafted is None:
            steps = slot.steps_for(padded, max_steps) if num_steps is None else num_steps
            num_drafted = steps * len(num_accepted)
        self._limits.observe(num_accepted, num_drafted)
        alive = batch_size if num_requests is None else num_requests
        return slot.observe(
            ObservedRound(
                alive,
                padded,
                num_accepted,
                num_steps,
                seconds,
                max_steps,
                num_asked,
                return_seconds,
            )
        )

    def expect_unverified(self) -> None:
        """From now on `learn` tells what drafts would have brought where there were none."""
        for slot in (*self._slots, *self._sampled_slots):
            if isinstance(slot, CostModelSlot):
                slot.is_watched = True

    def learn(
        self,
        batch_size: int,
        num_accepted: Sequence[int],
        num_steps: int,
        num_requests: int,
        sampled: bool = False,
    ) -> None:
        """What drafts of `num_steps` would have brought to some requests of a batch, `num_requests`
        with those that need none; they were compared with what was emitted, and not verified."""
        _, slot = self._place(batch_size, sampled)
        if isinstance(slot, CostModelSlot):
            slot.learn(num_accepted, num_steps, num_requests)

    @property
    def compares_times(self) -> bool:
        """Whether round times matter to what it decides."""
        return any(isinstance(slot, CostModelSlot) for slot in self._slots)

    def new_mark(self) -> RequestMark:
        """For one request: it says from round to round whether drafting for that request is worth
        it."""
        return RequestMark(self._marks)

    def _place(self, batch_size: int, sampled: bool) -> tuple[int, DraftLenPolicy]:
        sizes = self._graph_batch_sizes
        at = bisect_left(sizes, batch_size)
        padded = sizes[at] if at < len(sizes) else batch_size
        slots = self._sampled_slots if sampled else self._slots
        slot = slots[max(0, bisect_right(self._bounds, padded) - 1)]
        self._places[batch_size, sampled] = padded, slot
        return padded, slot

    def state(self) -> dict[str, Any]:
        """Everything that decisions rest on, as plain values for /server_info."""
        return {
            "draft_lens": list(self.draft_lens),
            "slots": {
                row_name(slot.lower_bound, slots is not self._slots): slot.state()
                for slots in {
                    id(slots): slots for slots in (self._slots, self._sampled_slots)
                }.values()
                for slot in slots
            },
            "limits": self._limits.state(),
            "decisions": self._log.state(),
            "round_ms": self._times.state() if self._times else {},
        }
