"""Records served requests (`record_traffic`) for replay, in a thread of its own.

The executor's thread only appends references to two queues, whose length is limited. All else, from
counting a round's tokens to the disk, happens in the recorder's thread."""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from queue import Empty, SimpleQueue
from time import monotonic, time  # noqa: TID251  # records have dates
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch

from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.executor.device.transfer import TextStates
from tllm_spec.executor.request import DecodingRules, LlmRequest
from tllm_spec.executor.rounds.round_reader import LaunchedRound
from tllm_spec.grammar.guided_decoding import compiler_name
from tllm_spec.grammar.thinking_budget import Budget
from tllm_spec.outputs import spans_of
from tllm_spec.recording.traffic_folder import HiddenStates, TrafficFolder
from tllm_spec.recording.traffic_record import Sampling, TrafficRecord, WeightSpan, rounds_until

logger = logging.getLogger(__name__)

MAX_ROUNDS = 1 << 11  # that wait; the times of older ones are lost
MAX_ENDS = 1 << 10  # requests that wait to be written; more are lost
MAX_TEXTS = 8  # that may have all of the memory for states of running requests
PAUSE_SECONDS = 0.5  # after which rounds are looked at though no request has ended
END_SECONDS = 10.0  # for what is left to write at the end
# After so many records the log says once where another drafter may be found, if their requests had
# fewer tokens a round than this.
ADVISED_RECORDS, LOW_ACCEPTANCE_LENGTH = 64, 1.3


class ReadRound(NamedTuple):
    """time: `monotonic`. table: as `LaunchedRound.wait`. num_drafts: of each generating request;
    None: in the table after `path` tokens."""

    time: float
    contexts: list[LlmRequest]
    generating: list[LlmRequest]
    num_drafts: list[int] | None
    path: int
    table: list[list[int]]


def _guided_by(request: LlmRequest) -> bool | str:
    """What compiled the grammar, after `thinking_budget` with a budget; or one of the two."""
    if request.grammar is None:
        return False
    source = request.grammar.source
    if source.kind != "thinking_budget":
        return compiler_name()
    has_grammar = Budget.of(source)[1] is not None
    return f"{source.kind} {compiler_name()}" if has_grammar else source.kind


class TrafficRecorder:
    """Lossy on purpose: a slow or full disk loses records and delays nothing.

    share: of requests whose hidden states are recorded, too; `spec` captures them."""

    def __init__(self, folder: TrafficFolder, spec: SpecMetadata | None, share: float) -> None:
        self.num_lost = 0
        self._folder = folder
        self._spec, self._share = spec, share
        self._num_without_hit = 0
        self._running_states: WeakSet[TextStates] = WeakSet()
        self._rounds: deque[ReadRound] = deque(maxlen=MAX_ROUNDS)
        self._ends: SimpleQueue[LlmRequest | None] = SimpleQueue()
        self._epoch_us = int((time() - monotonic()) * 1e6)
        self._is_failing = False
        self._run_id, self._num_records = secrets.token_hex(6), 0
        self._num_rounds = self._num_emitted = 0
        self._thread = threading.Thread(target=self._main, name="tllm-recorder", daemon=True)
        self._thread.start()

    # The executor's thread calls these four.

    def start(self, request: LlmRequest) -> None:
        """Begins to keep the states of a chosen request. States of a cached prefix are not
        computed, so such a request has none; those of running requests take at most as much of the
        host's memory as the files may have."""
        if self._spec is None or request.kv_len or not is_wanted(request):
            return
        self._num_without_hit += 1
        number = self._num_without_hit * self._share
        row_bytes, limit = self._spec.buffer[0].nbytes, self._folder.max_states_bytes
        # All rows of each window are sent.
        most = (request.prompt_len + request.max_tokens * request.counters.width) * row_bytes
        states = TextStates(min(most, limit // MAX_TEXTS), row_bytes)
        taken = sum(each.num_bytes for each in self._running_states) + states.num_bytes
        if int(number) > int(number - self._share) and taken <= limit:
            request.text_states = states
            self._running_states.add(states)

    def add_round(
        self, launched: LaunchedRound, table: list[list[int]], *, counts_drafts: bool
    ) -> None:
        """Queues a round that the host has read. counts_drafts: as in `read_round`."""
        batch, num_drafts = launched.batch, None if counts_drafts else launched.num_drafts
        contexts, generating = launched.ended_contexts, batch.generation_requests
        read = ReadRound(monotonic(), contexts, generating, num_drafts, batch.shape.path, table)
        self._rounds.append(read)

    def add_end(self, request: LlmRequest) -> None:
        """Queues a request that has ended; its tokens do not change any more."""
        if not is_recorded(request):
            return
        if self._ends.qsize() < MAX_ENDS:
            self._ends.put(request)
        else:
            self.num_lost += 1

    def close(self) -> None:
        """Writes what is left, for a limited time."""
        self._ends.put(None)
        self._thread.join(END_SECONDS)

    # The recorder's thread.

    def _main(self) -> None:
        is_open = True
        while is_open:
            ended = self._take_ended()
            is_open = None not in ended
            self._count_rounds()
            requests = [each for each in ended if each is not None]
            records = [self._record(each) for each in requests]
            if records:
                with self._writing(len(records)):
                    self._folder.append([record.to_line() for record in records])
            for request, record in zip(requests, records, strict=True):
                self._add_states(request, record)
                self._advise(record)

    def _advise(self, record: TrafficRecord) -> None:
        self._num_rounds += record.num_rounds
        self._num_emitted += record.num_emitted
        if not record.id.endswith(f"-{ADVISED_RECORDS}") or not self._num_rounds:
            return
        acceptance_length = self._num_emitted / self._num_rounds
        if acceptance_length < LOW_ACCEPTANCE_LENGTH:
            logger.info(
                "the first %d recorded requests had %.2f tokens a round; "
                "tllm-bench tune %s --config FILE says whether another drafter would be better",
                *(ADVISED_RECORDS, acceptance_length, self._folder.path),
            )

    def _take_ended(self) -> list[LlmRequest | None]:
        """Waits for requests that have ended. None among them: the recorder ends."""
        try:
            ended = [self._ends.get(timeout=PAUSE_SECONDS)]
        except Empty:
            return []
        while not self._ends.empty():
            ended.append(self._ends.get())
        return ended

    def _count_rounds(self) -> None:
        while self._rounds:
            read = self._rounds.popleft()
            now = int(read.time * 1e6)
            rows = iter(read.table)
            for request, row in zip(read.contexts, rows, strict=False):
                _add_round(request, now, row[0], None)
            for index, (request, row) in enumerate(zip(read.generating, rows, strict=False)):
                number = row[1 + read.path] if read.num_drafts is None else read.num_drafts[index]
                _add_round(request, now, row[0], number)

    def _record(self, request: LlmRequest) -> TrafficRecord:
        self._num_records += 1
        client, user = self._folder.hashes_of(request.client)
        stats, longest = request.counters.stats(), request.counters.width - 1
        output = request.tokens[request.prompt_len :]
        spans = spans_of(request.weight_versions, len(output))
        return TrafficRecord(
            id=f"{self._run_id}-{self._num_records}",
            client=client,
            user=user,
            arrived_us=self._epoch_us + int(request.arrived_at * 1e6),
            prompt=request.tokens[: request.prompt_len],
            output=output,
            seed=request.seed,
            sampling=sampling_of(request.rules),
            max_tokens=request.max_tokens,
            draft_limit=request.draft_limit if request.draft_limit < longest else None,
            guided=_guided_by(request),
            finish_reason=request.finish_reason or "",
            rounds=rounds_until(request.recorded_rounds, len(output)),
            num_rounds=stats.rounds,
            num_emitted=stats.num_emitted_tokens,
            drafted=list(stats.per_position_drafted),
            accepted=list(stats.per_position_accepted),
            cached_tokens=request.cached_tokens,
            num_preemptions=request.num_preemptions,
            draft_version=request.draft_version,
            weight_version=spans[-1].version if spans else None,
            weight_versions=[
                WeightSpan(version=span.version, start=span.start, end=span.end) for span in spans
            ],
            adapter=request.adapter,
        )

    def _add_states(self, request: LlmRequest, record: TrafficRecord) -> None:
        states, request.text_states = request.text_states, None
        if states is None or self._spec is None or record.num_preemptions or states.is_dropped:
            return
        ids = [*record.prompt, *record.output][:-1]
        rows = states.read()[: len(ids)]
        layers, size = self._spec.layers[:-1], rows.shape[1] // len(self._spec.layers)
        parts = rows[:, :-size], rows[:, -size:]
        found = HiddenStates(record, layers, torch.tensor(ids), *parts)
        with self._writing(1):
            self._folder.add_states(record, found.to_file())

    @contextmanager
    def _writing(self, number: int) -> Iterator[None]:
        """Counts `number` records as lost, with a warning, if the block raises OSError."""
        try:
            yield
        except OSError as error:
            self.num_lost += number
            if not self._is_failing:
                logger.warning("traffic cannot be recorded, records are lost: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


def is_wanted(request: LlmRequest) -> bool:
    """A request whose cached text is its client's own is recorded only if the client says so
    (`store: true`), any other unless the client says no."""
    return request.store if request.store is not None else request.cache_salt is None


def is_recorded(request: LlmRequest) -> bool:
    """Whether a request is recorded at its end: only with an output."""
    has_output = request.finish_reason != "error" and request.num_output_tokens > 0
    return has_output and is_wanted(request)


def sampling_of(rules: DecodingRules) -> Sampling:
    """The rules in JSON's types. The bias of a token that is excluded is null."""
    plain: dict[str, Any] = {}
    for each in fields(rules):
        value = getattr(rules, each.name)
        plain[each.name] = sorted(value) if isinstance(value, frozenset) else value
    infinite = float("-inf")
    bias = {str(key): None if b == infinite else b for key, b in rules.token_bias.items()}
    return cast(Sampling, plain | {"token_bias": bias, "edits": len(rules.edits)})


def _add_round(request: LlmRequest, now: int, num_tokens: int, num_drafts: int | None) -> None:
    offset = max(0, now - int(request.arrived_at * 1e6))
    request.recorded_rounds.append((offset, num_tokens, num_drafts))
