"""The request loop. `step` is one round; everything that differs between the ways of speculating
was plugged in by `build.py`.

It runs in one thread. Requests and cancellations come in through the queue, responses leave through
`respond`.

With overlap the host reads a round after it has launched the next one. It schedules by upper bounds
(`LlmRequest.tokens_in_flight`), and a request that turns out to be finished has taken part in one
round too many, whose results are dropped. Its slot and pages can go to others at once, since the
device works in order. Where all running requests may turn out to be finished, the host reads first.

Where the next round needs the tokens on the host (a host drafter, a logits processor, drafts of
text that grammars force), the device still runs while the host schedules; only then the host reads,
drafts and launches. Elsewhere, with a grammar, the host reads between a round's two launches, the
forward and what follows."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.device_choice import use_device
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.request import LlmRequest, RequestState, Response, response_of
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.round_reader import (
    LaunchedRound,
    RoundClock,
    RoundOutcome,
    read_round,
)
from tllm_spec.executor.rounds.round_runner import RoundRunner
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.scheduler import Scheduler
from tllm_spec.executor.sleep import Sleep
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.hindsight import Hindsight
from tllm_spec.executor.speculative.drafting.drafter import Drafter, take_ready
from tllm_spec.executor.target_weights import TargetWeights
from tllm_spec.executor.totals import DraftWatch, IterationStats, RoundLog, Totals
from tllm_spec.executor.traffic_recorder import TrafficRecorder
from tllm_spec.executor.weight_swap import StagedWeights
from tllm_spec.request_errors import described

# The parts of an executor, and what they tell of it between two rounds.


@dataclass
class ExecutorParts:
    """What `build.py` puts together."""

    queue: RequestQueue
    scheduler: Scheduler
    kv: KVCacheManager
    resources: list[ResourceManager]  # called in this order
    slots: SlotState
    runner: RoundRunner
    drafter: Drafter
    sampler: Sampler
    controller: AdaptiveController  # of the draft length
    # The tier (see `DraftShapes`) of a round with a number of generating requests.
    tier_for: Callable[[int], int]
    # The requests whose code or drafts caused the latest exception; None: not known.
    blame: Callable[[], list[LlmRequest] | None]
    draft_watch: DraftWatch
    sleep: Sleep
    max_in_flight: int = 0  # rounds that are launched before the oldest is read: 1 with overlap
    # Whether a round may be launched before the round before is read.
    overlaps: bool = True
    cpu_threads: int | None = None  # of torch in the executor's thread; None: torch's own number
    stream_interval: int = 1
    iteration_stats: IterationStats | None = None  # with enable_iter_perf_stats
    round_log: RoundLog | None = None  # with print_iter_log, on rank 0
    draft_weights: DraftWeights | None = None  # None: they cannot be replaced
    target_weights: TargetWeights | None = None  # likewise
    adapters: AdapterSlots | None = None  # with lora_config
    recorder: TrafficRecorder | None = None  # with record_traffic, on rank 0
    hindsight: Hindsight | None = None  # where copied drafts are one choice of several
    ranks: Sequence[Mapping[str, Any]] = ()  # all of them, as `state` shows them


_needs_host_tokens, _draft_limit = attrgetter("needs_host_tokens"), attrgetter("draft_limit")


class Load(NamedTuple):
    """Requests now, the latest round's tier by name, and since the start rounds (counted
    once for each request) and the tokens that they emitted."""

    num_running: int
    num_waiting: int
    tier_name: int | str | None
    request_rounds: int
    emitted_tokens: int


class PyExecutor:
    """One model (and its drafter) serving requests, round after round."""

    def __init__(self, parts: ExecutorParts, respond: Callable[[list[Response]], None]) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.resources = parts.resources
        self._respond = respond
        self._speculating = parts.slots.max_draft_len > 0
        self._drafts_ahead = parts.drafter.drafts_ahead
        self._scheduled = ScheduledBatch()  # until it is launched
        self._reading = ScheduledBatch()  # while it is read
        self._latest_name: int | str | None = None  # of the latest round's shape
        self._made_shape = NO_DRAFTS  # of the drafts in the slots
        self._in_flight: deque[LaunchedRound] = deque()
        self._clock = RoundClock()
        self._unsettled: list[tuple[ScheduledBatch, list[LlmRequest]]] = []
        parts.sampler.grammar_masks.read_rounds = self._read_rounds
        # On the CPU nothing has to be waited for, and every row costs time.
        self._narrows = parts.slots.counts_drafts and parts.slots.device.type == "cpu"
        self.is_paused = False
        self.totals = Totals()

    def enter_thread(self) -> None:
        """Called once by the thread that will run the rounds."""
        use_device(self.parts.slots.device)
        if self.parts.cpu_threads is not None:
            torch.set_num_threads(self.parts.cpu_threads)

    @torch.inference_mode()
    def step(self) -> bool:
        """One round: launches what can run, then reads what is due. False when nothing is left to
        do."""
        self._fetch_new_requests()
        if self.is_paused or self.parts.sleep.holds_rounds:
            return self._complete_rounds(0)
        if self.parts.draft_weights is not None:
            self.parts.draft_weights.swap_back_if_worse()
        if self.scheduler.may_be_done():
            self._complete_rounds(0)
        generating = self.scheduler.generating()
        wants_drafts = self._speculating and any(map(_draft_limit, generating))
        tier = self._tier_for(generating) if wants_drafts else 0
        shape = self.parts.slots.shapes.of(tier)
        needs_tokens = self._needs_all_tokens(shape.depth)
        if self._speculating:
            self._prepare_draft_requests(generating, shape.depth)
        batch = self._schedule(generating, shape)
        has_read = needs_tokens and self._complete_before(batch)
        if batch:
            self._launch(batch)
        has_read |= self._complete_rounds(self.parts.max_in_flight if batch else 0)
        return has_read or bool(batch)

    @torch.inference_mode()
    def pause(self, *, retract: bool) -> None:
        """Reads the rounds in flight and launches no more until `is_paused` is False. retract:
        running requests go back to the queue, to be computed again. Between rounds only."""
        self.is_paused = True
        self._complete_rounds(0)
        if retract:
            for request in reversed(self.scheduler.running.copy()):
                self.scheduler.preempt(request)

    def sleep(self, level: int) -> dict[str, Any]:
        """As `Sleep.begin`. Running requests go back to the queue."""
        was_paused = self.is_paused
        self.pause(retract=True)
        self.is_paused = was_paused
        return self.parts.sleep.begin(level, can_update=self.parts.target_weights is not None)

    def swap_draft(self, staged: StagedWeights, **options: Any) -> int:
        """As `DraftWeights.swap`. Between rounds only."""
        assert self.parts.draft_weights is not None
        self.parts.sleep.check_writable()
        return self.parts.draft_weights.swap(staged, **options)

    def replace_weights(self, new: StagedWeights, version: str | None, *, retract: bool) -> float:
        """Replaces the target's weights. retract: as with `pause`; otherwise running requests go on
        with what the old weights have computed of them. Returns for how many seconds no round ran.
        Between rounds only."""
        weights, was_paused, start = self.parts.target_weights, self.is_paused, monotonic()
        assert weights is not None
        self.parts.sleep.check_writable()
        self.pause(retract=retract)
        weights.replace(new, version)
        if new.part != "draft":
            self.parts.sleep.note_target()
        self.parts.controller.forget()
        if self.parts.draft_weights is not None:
            self.parts.draft_weights.keep_present()
        for request in (*self.scheduler.waiting, *self.scheduler.running):
            request.note_weights(weights.version)
        self.is_paused = was_paused
        return monotonic() - start

    def _launch(self, batch: ScheduledBatch) -> None:
        for manager in self.resources:
            manager.prepare_resources(batch)
        drafter = self.parts.drafter
        if self._drafts_ahead:
            forced = drafter.knows_forced_text
            take_ready(batch, self.parts.slots, knows_forced_text=forced, narrows=self._narrows)
        drafter.prepare_draft_tokens(batch)
        if self.parts.slots.shapes.further_tiers:
            self._note_tiers(batch)
        launched = self.parts.runner.launch(batch)
        self._advance(batch, launched)
        self._in_flight.append(launched)
        self._scheduled = ScheduledBatch()
        self._settle()

    def _note_tiers(self, batch: ScheduledBatch) -> None:
        """Called where rounds choose between chains and trees."""
        shapes = self.parts.slots.shapes
        made = self._made_shape if self._drafts_ahead else batch.shape
        self._made_shape = batch.new_shape
        if batch.generation_requests:
            batch.is_transition = made != batch.shape
            batch.cuts_copies = made.is_copied and batch.shape.depth < made.depth
            batch.verified_tier = shapes.lower(made, batch.shape) if batch.made_draft_len else 0

    def _complete_before(self, batch: ScheduledBatch) -> bool:
        """Reads all rounds in flight. `batch` is scheduled: it keeps its pages, and loses the
        requests that turn out to be finished."""
        self.parts.kv.scheduled_window = batch.shape.window
        try:
            has_read = self._complete_rounds(0)
        finally:
            self.parts.kv.scheduled_window = 0
        batch.drop_finished()
        return has_read

    def _complete_rounds(self, max_in_flight: int) -> bool:
        """Reads the oldest rounds until `max_in_flight` are left. Returns whether it read any."""
        worked = False
        while len(self._in_flight) > max_in_flight:
            self._update_requests(self._in_flight.popleft())
            self._settle()
            worked = True
        return worked

    def _read_rounds(self) -> None:
        """Reads all rounds in flight while the next one is being launched, which takes the requests
        as they are: what follows from reading waits until `_settle`."""
        while self._in_flight:
            self._update_requests(self._in_flight.popleft())

    def _settle(self) -> None:
        """Responds to what was read, and gives slots and pages back."""
        interval = self.parts.stream_interval
        while self._unsettled:
            self._reading, responding = self._unsettled.pop(0)
            for manager in self.resources:
                manager.update_resources(self._reading)
            growing = [
                each
                for each in responding
                if each.streaming
                and not each.is_finished
                and each.num_output_tokens - each.num_responded >= interval
            ]
            self._end([each for each in responding if each.is_finished], growing)
            self._reading = ScheduledBatch()

    def _needs_all_tokens(self, draft_len: int) -> bool:
        """Whether a drafter or a user's logits processor must see the requests' tokens before the
        next round is launched, or a drafter makes better drafts then."""
        running = self.scheduler.running
        if not self.parts.overlaps or any(map(_needs_host_tokens, running)):
            return True
        # Overlap is worth less than drafts of text that grammars force, if enough requests have it.
        is_known = draft_len > 0 and self.parts.drafter.knows_forced_text
        return is_known and len(running) <= 2 * sum(each.grammar is not None for each in running)

    def _fetch_new_requests(self) -> None:
        new, cancelled = self.parts.queue.take()
        for request in new:
            try:
                if self.parts.sleep.refusal is not None:
                    raise ValueError(self.parts.sleep.refusal)
                self.scheduler.add(request)
            except ValueError as error:
                request.finish("error", error=str(error))
                self.totals.add_end(request)
                self._respond([response_of(request, speculating=self._speculating)])
        if cancelled:
            alive = {
                request.request_id: request
                for request in (*self.scheduler.waiting, *self.scheduler.running)
            }
            self._end([alive[i] for i in cancelled if i in alive], reasons=cancelled)

    def _tier_for(self, requests: list[LlmRequest]) -> int:
        """The controller's choice for a round of these requests."""
        controller = self.parts.controller
        if controller.knows_contexts:
            num_tokens = sum(request.num_tokens_bound for request in requests)
            controller.note_context(num_tokens // len(requests))
        return self.parts.tier_for(len(requests))

    def _prepare_draft_requests(self, generating: list[LlmRequest], draft_len: int) -> None:
        """Attaches placeholders, so that scheduling counts the drafts of the round before they
        exist."""
        placeholders = [0] * draft_len
        for request in generating:
            # A drafter on the device leaves the placeholders of the round before.
            if request.py_draft_tokens != placeholders:
                request.py_draft_tokens = placeholders.copy()
            request.py_num_draft_tokens = 0

    def _schedule(self, generating: list[LlmRequest], shape: DraftShape) -> ScheduledBatch:
        is_ragged = shape.num_nodes > 0 and self.parts.runner.is_ragged(generating, shape)
        batch, admitted = self.scheduler.schedule(generating, shape, is_ragged=is_ragged)
        self._scheduled = batch
        batch.joining, batch.context_len = admitted, self.parts.controller.context_len
        for request in admitted:
            if request.first_scheduled_time is None:
                if self.parts.draft_weights is not None:
                    request.draft_version = self.parts.draft_weights.version
                if self.parts.target_weights is not None:
                    request.weight_versions.append((self.parts.target_weights.version, 0))
                if self.parts.recorder is not None:
                    self.parts.recorder.start(request)
                request.cached_tokens, request.first_scheduled_time = request.kv_len, monotonic()
                request.reported_cached_tokens = self.parts.kv.cache.reported_len(
                    request.kv_len, request.salt
                )
        generating = batch.generation_requests
        if batch.drafts_after_contexts and not any(each.draft_limit for each in generating):
            ending = batch.last_chunk_requests
            batch.new_shape = self.parts.slots.shapes.of(self._tier_for(generating + ending))
        elif generating:
            batch.new_shape = shape
        if not generating:
            batch.shape = NO_DRAFTS
        return batch

    def _advance(self, batch: ScheduledBatch, launched: LaunchedRound) -> None:
        """What the host knows of the round before reading it: contexts move on by their chunks,
        generations by 1 to K + 1 tokens."""
        num_after_contexts = batch.new_shape.depth if batch.drafts_after_contexts else 0
        for request in batch.context_requests:
            request.kv_len += request.context_chunk
            request.context_chunk = 0
        for request in launched.ended_contexts:
            request.state = RequestState.GENERATION
            request.tokens_in_flight += 1
            request.num_drafts_ready = num_after_contexts
        path, num_drafts_ready = batch.shape.path, batch.new_shape.depth
        for request in batch.generation_requests:
            request.tokens_in_flight += path
            request.num_drafts_ready = num_drafts_ready

    def _update_requests(self, launched: LaunchedRound) -> None:
        """The host learns what was emitted; what follows from it waits until `_settle`."""
        batch = self._reading = launched.batch
        table, logprobs = launched.wait()
        outcome = RoundOutcome(self._clock.lap(launched.ended_at, launched.post_send))
        speculating = self._speculating
        counts_drafts = self.parts.slots.counts_drafts or launched.batch.shape.is_copied
        if (recorder := self.parts.recorder) is not None:
            recorder.add_round(launched, table, counts_drafts=counts_drafts)
        how = {"speculating": speculating, "counts_drafts": counts_drafts}
        responding = read_round(launched, table, logprobs, outcome, **how)
        timed = None if batch.context_requests else outcome.seconds
        self.totals.add_round(batch.shape.depth, outcome.num_requests, outcome.num_tokens, timed)
        shapes = self.parts.slots.shapes
        self._latest_name = shapes.name(shapes.tier_of(batch.shape))
        if self._speculating and batch.generation_requests:
            outcome.report_to(self.parts.controller, batch, self.parts.hindsight)
            self.totals.add_drafts(sum(launched.num_drafts), outcome.num_drafted)
            self.parts.draft_watch.add(outcome.num_drafted, sum(outcome.num_accepted))
        if self.parts.iteration_stats is not None:
            self.parts.iteration_stats.add(batch, outcome)
        if self.parts.round_log is not None:
            self.parts.round_log.add(batch, outcome)
        self._unsettled.append((batch, responding))
        self._reading = ScheduledBatch()

    def _end(
        self,
        requests: list[LlmRequest],
        growing: Iterable[LlmRequest] = (),
        reasons: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Responds for all at once, also if freeing one of them fails. growing: requests that go
        on and have a response. reasons: by id, where a request has no finish reason yet."""
        ended: list[LlmRequest] = []
        try:
            for request in requests:
                if (reason := reasons.get(request.request_id)) is not None:
                    request.finish(reason)
                request.kv_len = min(request.kv_len, max(request.num_tokens - 1, 0))
                for manager in self.resources:
                    manager.free_resources(request)
                self.scheduler.remove(request)
                self.totals.add_end(request)
                if self.parts.recorder is not None:
                    self.parts.recorder.add_end(request)
                if self.parts.draft_weights is not None:
                    self.parts.draft_weights.add_end(request)
                ended.append(request)
        finally:
            if responding := [*growing, *ended]:
                self._respond([response_of(r, speculating=self._speculating) for r in responding])

    @torch.inference_mode()
    def recover(self, error: BaseException) -> None:
        """A round raised `error`. The requests that caused it fail with it, or all requests of the
        round if that is not known; the others go on from where they stood before the round. Raises
        the error again if the round had no requests."""
        broken = self._reading or self._scheduled
        alive = dict.fromkeys(broken.requests() + self._scheduled.requests())
        self._reading, self._scheduled = ScheduledBatch(), ScheduledBatch()
        self._clock.stop()
        culprits = self.parts.blame()
        self._settle()
        if culprits is None:
            culprits = [request for request in broken.requests() if request.slot >= 0]
            if not culprits:
                raise error  # no request to end: the next round would raise the same
        for request in alive:
            request.context_chunk = 0
        for request in culprits:
            if not request.is_finished:  # by the part of the round that was read
                request.finish("error", error=described(error))
        self._end(culprits)
        try:
            self._complete_rounds(0)
        finally:
            for request in alive:
                if request.slot >= 0:
                    self._restart(request)

    def _restart(self, request: LlmRequest) -> None:
        """Takes the request back to what the host has read of it."""
        request.num_drafts_ready, request.text_states = 0, None
        if self.parts.runner.engine.has_states:  # which may have the round's tokens
            self.scheduler.preempt(request)
            return
        self.parts.slots.start(request)
        self.parts.kv.rewind(request, request.kv_len + self.parts.kv.extra_kv_tokens)
        self.parts.sampler.start(request)  # its token counts may include the round's tokens

    def close(self) -> None:
        """Called after the last round."""
        if self.parts.recorder is not None:
            self.parts.recorder.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when slots or pages do not add up."""
        for manager in self.resources:
            manager.check_integrity()

    def load(self) -> Load:
        """What runs now, cheaply. Between rounds only."""
        queues, totals = self.scheduler, self.totals
        return Load(len(queues.running), len(queues.waiting), self._latest_name, *totals.decoded())

    def state(self) -> dict[str, Any]:
        """Queues, totals, cache and draft lengths as plain values. Between rounds only."""
        parts, totals = self.parts, self.totals
        queues, controller, slots = parts.scheduler, parts.controller, parts.slots
        shape = slots.shapes.of(controller.tier_for(max(1, totals.latest_batch_size)))
        own: dict[str, Any] = {"sleep": parts.sleep.state()}
        if (weights := parts.draft_weights) is not None:
            own["draft_weights"] = weights.state()
        if parts.target_weights is not None:
            own["weight_version"] = parts.target_weights.version
        if parts.adapters is not None:
            own["adapters"] = parts.adapters.state()
        if parts.recorder is not None:
            own["lost_records"] = parts.recorder.num_lost
        return {
            "num_requests_running": len(queues.running),
            "num_requests_waiting": len(queues.waiting),
            "num_preemptions": queues.num_preemptions,
            "is_paused": self.is_paused,
            "draft_len": shape.depth,
            "draft_shape": {
                "name": shape.name,
                "depth": shape.depth,
                "drafts": shape.num_nodes,
                "topk": shape.topk,
            },
            "draft_warning": parts.draft_watch.warning,
            "kv_cache": parts.kv.state(),
            "totals": totals.state([*queues.running, *queues.waiting]),
            "controller": controller.state(),
            "ranks": list(parts.ranks),
            **parts.drafter.state(),
            **own,
        }
