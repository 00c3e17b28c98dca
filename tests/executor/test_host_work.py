"""What the host does in a round, against a device that answers from a script: it leaves out only
what has no effect, and how much it does is counted, not timed."""

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from random import Random
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.one_group import all_are_free
from tests.executor.scripted_rounds import ScriptedEngine
from tllm_spec.config.draft_shape import DraftShape, chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import NO_TOKEN, LlmRequest, RequestState, Response, StopMatch
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD
from tllm_spec.executor.rounds.round_reader import LaunchedRound
from tllm_spec.executor.speculative.drafting.drafter import take_ready

RATES = {"plain": (), "three": (0.73, 0.52, 0.35), "seven": (0.9,) * 7, "all_of_seven": (1.0,) * 7}


class Watched:
    """An engine whose rounds are looked at when they are launched. `runs` holds what the device
    made for a request."""

    def __init__(self, rates: tuple[float, ...], **options: Any) -> None:
        self.responses: dict[int, list[Response]] = {}
        self.engine = ScriptedEngine(8, rates, respond=self._receive, page_size=4, **options)
        self.executor, self.parts = self.engine.executor, self.engine.parts
        self.runs: dict[int, list[list[int]]] = {}
        self._num_steps = 0
        self.num_borders = 0  # windows that end exactly where a request's pages end
        self._kv_lens: dict[LlmRequest, int] = {}  # true ones, which the host learns a round late
        self._launch: Callable[[ScheduledBatch], LaunchedRound] = self.parts.runner.launch
        self.parts.runner.launch = self._watched_launch

    def run(self) -> None:
        while self.step():
            self.executor.check_integrity()

    def step(self) -> bool:
        self._num_steps += 1
        assert self._num_steps < 5000, "the executor does not come to an end"
        return self.executor.step()

    def _receive(self, responses: list[Response]) -> None:
        for response in responses:
            self.responses.setdefault(response.request_id, []).append(response)

    def _watched_launch(self, batch: ScheduledBatch) -> LaunchedRound:
        for request in batch.requests():
            self._check_pages(request, batch)
        launched = self._launch(batch)
        table = launched.to_host.wait()[0].tolist()
        for request, (num_new, *tokens) in zip(
            launched.ended_contexts + batch.generation_requests, table, strict=True
        ):
            self.runs.setdefault(request.request_id, []).append(tokens[:num_new])
            if request in batch.generation_requests:
                self._kv_lens[request] += num_new
        return launched

    def _check_pages(self, request: LlmRequest, batch: ScheduledBatch) -> None:
        kv = self.parts.kv
        pages = kv.cache.pages(request.request_id)
        if request in batch.context_requests:
            end = self._kv_lens[request] = request.kv_len + request.context_chunk
        else:
            end = self._kv_lens[request] + batch.shape.window
            assert request.kv_len <= self._kv_lens[request] < request.num_tokens_bound
        room = len(pages) * 4 - end - kv.extra_kv_tokens
        assert room >= 0, "a window would be written after the request's pages"
        self.num_borders += room == 0
        assert kv.groups[0].table.device_rows[request.slot, : len(pages)].tolist() == pages


class StopAt:
    """A stop string of one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def feed(self, token: int) -> StopMatch | None:
        return StopMatch("stop", "", 0) if token == self._token else None


def text_of(request: LlmRequest, runs: list[list[int]], stops: set[int]) -> tuple[list[int], str]:
    """What the rounds make of a request when each token is looked at for itself."""
    output: list[int] = []
    for token in (token for run in runs for token in run):
        if token == NO_TOKEN:
            return output, "error"
        output.append(token)
        if token in stops:
            return output, "stop"
        if len(output) == request.max_tokens:
            return output, "length"
    raise AssertionError("the request ended before its text did")


def submit_all_kinds(watched: Watched, random: Random) -> list[tuple[LlmRequest, set[int]]]:
    """Requests and the tokens that end them; every fifth is cancelled as soon as it has three
    tokens."""
    requests = []
    for number in range(40):
        stops = set(random.sample(range(3, 300), random.choice((0, 0, 4, 20))))
        by_string = bool(stops) and number % 3 == 0
        [request] = watched.engine.put(
            1,
            random.randrange(1, 30),
            random.randrange(1, 60),
            streaming=number % 2 == 0,
            stop_token_ids=None if by_string else sorted(stops),
        )
        if by_string:
            stops = {min(stops)}
            request.stop_checker = StopAt(min(stops))
        requests.append((request, stops | {2}))  # 2 is the end token of all
    for request, _ in requests[4::5]:
        while request.num_output_tokens < 3 and not request.is_finished:
            watched.step()
        watched.parts.queue.cancel(request.request_id)
    return requests


def check_outcome(watched: Watched, request: LlmRequest, stops: set[int]) -> None:
    output, runs = request.tokens[request.prompt_len :], watched.runs.get(request.request_id, [])
    if request.finish_reason == "cancelled":
        assert output == [token for run in runs for token in run][: len(output)]
    else:
        assert (output, request.finish_reason) == text_of(request, runs, stops)
    told = watched.responses[request.request_id]
    assert [token for response in told for token in response.token_ids] == output
    assert [response.finish_reason for response in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].finish_reason == request.finish_reason and (request.streaming or len(told) == 1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("way", RATES)
@pytest.mark.parametrize("may_preempt", [False, True])
def test_shortcuts_of_a_round_miss_no_page_no_stop_and_no_response(
    way: str, may_preempt: bool
) -> None:
    reasons, num_preemptions = set(), 0
    for seed in range(4):
        watched = Watched(
            RATES[way],
            may_preempt=may_preempt,
            num_pages=61 if may_preempt else None,
            token_ids=[NO_TOKEN, NO_TOKEN, *range(300)],
        )
        requests = submit_all_kinds(watched, Random(seed))
        watched.run()
        for request, stops in requests:
            check_outcome(watched, request, stops)
        reasons |= {request.finish_reason for request, _ in requests}
        num_preemptions += watched.parts.scheduler.num_preemptions
        assert watched.num_borders and all_are_free(watched.parts.kv)
    assert reasons == {"cancelled", "stop", "length", "error"}
    assert bool(num_preemptions) == may_preempt


@pytest.mark.parametrize("may_preempt", [False, True])
def test_a_round_that_is_scheduled_before_the_last_is_read_keeps_its_pages_and_no_ended_request(
    may_preempt: bool,
) -> None:
    """As for a drafter on the host. The draft length changes, so the read round may have fewer
    tokens than the scheduled one."""
    num_pages = 61 if may_preempt else None
    watched = Watched(RATES["seven"], may_preempt=may_preempt, num_pages=num_pages)
    watched.parts.overlaps = False
    random, schedule = Random(2), watched.parts.scheduler.schedule
    watched.parts.tier_for = lambda *_: random.choice((0, 0, 0, 2, 7))
    in_flight = Counter[str]()

    def watched_schedule(generating: list[LlmRequest], shape: DraftShape, **options: bool) -> Any:
        in_flight["schedule"] += len(rounds_in_flight(watched.executor))
        return schedule(generating, shape, **options)

    def look(batch: ScheduledBatch) -> None:
        in_flight["launch"] += len(rounds_in_flight(watched.executor))
        assert not any(request.is_finished for request in batch.requests())

    before_launch(watched.executor, look)
    with mock.patch.object(watched.parts.scheduler, "schedule", watched_schedule):
        requests = submit_all_kinds(watched, Random(5))
        watched.run()
    for request, stops in requests:
        check_outcome(watched, request, stops)
    assert in_flight["schedule"] > 50 and not in_flight["launch"]
    assert bool(watched.parts.scheduler.num_preemptions) == may_preempt
    assert all_are_free(watched.parts.kv)


def test_only_streamed_requests_get_a_response_in_every_round() -> None:
    watched = Watched(())
    [quiet], [streamed] = watched.engine.put(1, 5, 20), watched.engine.put(1, 5, 20, streaming=True)
    watched.run()
    assert [len(response.token_ids) for response in watched.responses[streamed.request_id]] == [
        1
    ] * 20
    assert [len(response.token_ids) for response in watched.responses[quiet.request_id]] == [20]


def calls_of_a_step(engine: ScriptedEngine, num_steps: int) -> tuple[float, float]:
    """Python and C functions called, on average over the steps."""
    seen: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        seen[event] += 1

    for _ in range(num_steps):
        sys.setprofile(count)
        try:
            engine.executor.step()
        finally:
            sys.setprofile(None)
    return seen["call"] / num_steps, seen["c_call"] / num_steps


@pytest.mark.parametrize(
    ("way", "waiting", "python_calls", "c_calls"),
    [("plain", 0, 1.5, 9), ("plain", 20, 1.5, 9), ("three", 0, 4.0, 12.0)],
)
def test_a_request_costs_few_calls_a_round(
    way: str, waiting: int, python_calls: float, c_calls: float
) -> None:
    """Beyond what a round costs with one request; pages of 32 tokens, so that most rounds take none
    of a request."""
    found = []
    for batch_size in (1, 65):
        engine = ScriptedEngine(batch_size, RATES[way])
        requests = engine.put(batch_size + (waiting if batch_size > 1 else 0), 100, 2000)
        while requests[batch_size - 1].state is not RequestState.GENERATION:
            engine.executor.step()
        engine.executor.step()
        found.append(calls_of_a_step(engine, 64))
    per_request = [(many - one) / 64 for one, many in zip(*found, strict=True)]
    assert per_request[0] <= python_calls and per_request[1] <= c_calls, per_request


@pytest.mark.parametrize("way", ["plain", "three"])
def test_most_rounds_take_no_page_and_no_page_is_taken_twice(way: str) -> None:
    engine = ScriptedEngine(64, RATES[way], page_size=16)
    requests = engine.put(64, 100, 1000)
    while not all(
        request.tokens_in_flight and request.num_output_tokens > 20 for request in requests
    ):
        engine.executor.step()
    kv, cache = engine.parts.kv, engine.parts.kv.cache
    num_sent, given_back, flush, rewind = 0, 0, kv.groups[0].table.flush, cache.rewind

    def watched_flush() -> None:
        nonlocal num_sent
        num_sent += bool(kv.groups[0].table._changed)
        flush()

    def watched_rewind(seq_id: int, num_tokens: int) -> int:
        nonlocal given_back
        given_back += (number := rewind(seq_id, num_tokens))
        return number

    with (
        mock.patch.object(kv.groups[0].table, "flush", watched_flush),
        mock.patch.object(cache, "rewind", watched_rewind),
    ):
        for _ in range(100):
            engine.executor.step()
    assert 5 < num_sent <= 100 / (1 + ROUNDS_AHEAD) and given_back == 0
    assert not any(request.is_finished for request in requests)


@pytest.mark.parametrize(("may_preempt", "in_flight"), [(False, 1), (True, 1), (False, 0)])
def test_pages_are_taken_ahead_only_of_those_that_a_request_was_admitted_with(
    may_preempt: bool, in_flight: int
) -> None:
    """The pool has what eight requests may need, and not a page more. No page is taken
    ahead that was not promised, nor one that the end of the round would give back."""
    most = -(-(40 + 60 + 9) // 4)  # prompt, max_tokens and overshoot
    watched = Watched(RATES["three"], max_len=100, num_pages=1 + 8 * most, may_preempt=may_preempt)
    watched.parts.max_in_flight = in_flight
    requests = watched.engine.put(20, 40, 60)
    kv, prepare, num_ahead = watched.parts.kv, watched.parts.kv.prepare_resources, 0

    def watched_prepare(batch: ScheduledBatch) -> None:
        nonlocal num_ahead
        for request in batch.generation_requests:
            needed = kv.cache.pages_for(request.num_tokens_bound + 3 + kv.extra_kv_tokens)
            assert needed <= kv.held(request)[0] <= most
            num_ahead += kv.held(request)[0] > needed
        prepare(batch)

    with mock.patch.object(kv, "prepare_resources", watched_prepare):
        watched.run()
    assert bool(num_ahead) == (in_flight > 0 and not may_preempt)
    assert not watched.parts.scheduler.num_preemptions or may_preempt
    assert all(request.is_finished and request.error is None for request in requests)


def test_when_drafts_become_fewer_pages_ahead_for_them_go_back() -> None:
    watched = Watched(RATES["seven"])
    requests, kv = watched.engine.put(4, 20, 1000), watched.parts.kv
    while not all(request.num_output_tokens > 40 for request in requests):
        watched.step()

    def num_ahead(request: LlmRequest, window: int) -> int:
        """Pages beyond those that rounds of such windows may keep."""
        kept = (
            request.kv_len
            + kv.extra_kv_tokens
            + request.tokens_in_flight
            + (1 + ROUNDS_AHEAD) * window
        )
        return kv.held(request)[0] - kv.cache.pages_for(kept)

    assert all(num_ahead(request, 1) > 0 for request in requests)
    watched.parts.tier_for = lambda *_: 0
    for _ in range(3):
        watched.step()
    assert all(num_ahead(request, 1) <= 0 for request in requests)


def test_placeholders_are_a_list_of_its_own_for_each_request_whatever_the_round_before_left() -> (
    None
):
    engine = ScriptedEngine(4, RATES["three"])
    requests = engine.put(4, 5, 20)
    left: list[list[int]] = [[], [0, 0, 0], [7, 8, 9], [0, 0]]
    for request, tokens in zip(requests, left, strict=True):
        request.py_draft_tokens, request.py_num_draft_tokens = tokens, len(tokens)
    engine.executor._prepare_draft_requests(requests, 3)
    assert [request.py_draft_tokens for request in requests] == [[0, 0, 0]] * 4
    assert len({id(request.py_draft_tokens) for request in requests}) == 4
    assert not any(request.py_num_draft_tokens for request in requests)


def test_ready_drafts_are_limited_by_the_round_and_by_the_request() -> None:
    engine = ScriptedEngine(25, RATES["three"])
    requests = engine.put(25, 5, 20)
    numbers = list(product(range(5), repeat=2))
    for request, (ready, limit) in zip(requests, numbers, strict=True):
        request.num_drafts_ready, request.draft_limit = ready, limit
    batch = ScheduledBatch(generation_requests=requests, shape=chain_of(3))
    take_ready(batch, engine.parts.slots, knows_forced_text=False, narrows=False)
    assert [request.py_num_draft_tokens for request in requests] == [
        min(3, *each) for each in numbers
    ]
