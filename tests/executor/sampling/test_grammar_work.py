"""Work on grammars that takes too long is given up, with the requests of the grammar at fault."""

import gc
import weakref
from collections.abc import Iterator
from threading import Event, Thread, current_thread
from typing import Any

import pytest

from tests.server.http_answers import wait_for
from tllm_spec.distributed.communicator import Communicator, Mapping
from tllm_spec.executor.decoding_rules import DecodingRules
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling import grammar_work
from tllm_spec.executor.sampling.grammar_work import GrammarWork
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.request_errors import GrammarTooSlow
from tllm_spec.sampling_params import SamplingParams

RULES = DecodingRules.from_params(SamplingParams(), vocab_size=64, end_ids=(), encode=None)


class Matcher:
    stop_token_ids: tuple[int, ...] = ()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Set at the end of a test, so that threads that were given up end. The limit is short."""
    monkeypatch.setattr(grammar_work, "MAX_SECONDS", 0.02)
    monkeypatch.setattr(grammar_work, "MIN_FOR_THREADS", 2)
    event = Event()
    yield event
    event.set()


def requests_of(grammars: str) -> list[LlmRequest]:
    """One for each letter, which is its grammar."""
    return [
        LlmRequest(number, [1], RULES, seed=0, grammar=GrammarState(Matcher(), compiled=grammar))
        for number, grammar in enumerate(grammars)
    ]


class Ranks(Communicator):
    """A rank, and what rank 0 has given up, or None on rank 0."""

    def __init__(self, rank: int, given_up: list[int]) -> None:
        self.mapping = Mapping(world_size=2, rank=rank)
        self.shared: list[list[int]] = []
        self._given_up = given_up

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return self._given_up if self.mapping.rank else value


def test_the_grammar_that_takes_most_of_the_time_is_given_up_when_the_others_have_ended(
    released: Event,
) -> None:
    requests, ended, asked = requests_of("abcab"), list[int](), Event()

    def job(request: LlmRequest) -> None:
        if request is requests[1]:
            while not released.is_set():
                asked.set()
        asked.wait()  # the others have begun when that one takes its time
        ended.append(request.request_id)

    work = GrammarWork()
    with pytest.raises(GrammarTooSlow):
        work.run([(request, lambda request=request: job(request)) for request in requests])
    assert set(work.blame() or ()) == {requests[1], requests[4]} and work.blame() is None
    assert set(ended) >= {0, 2, 3}
    later = list[int]()
    work.run([(requests[0], lambda: later.append(0)), (requests[2], lambda: later.append(2))])
    assert sorted(later) == [0, 2]


def test_what_a_job_raises_is_its_requests_fault() -> None:
    requests, work = requests_of("aab"), GrammarWork()

    def fail() -> None:
        raise OverflowError("this one")

    jobs = [(request, fail if i == 1 else lambda: None) for i, request in enumerate(requests)]
    with pytest.raises(OverflowError, match="this one"):
        work.run(jobs)
    assert work.blame() == [requests[1]] and work.blame() is None


def test_several_ranks_give_up_what_rank_0_gives_up(
    released: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, first = requests_of("ab"), Ranks(0, [])
    work = GrammarWork(first)

    def endless() -> None:
        while not released.is_set():
            pass

    with pytest.raises(GrammarTooSlow):
        work.run([(requests[0], endless), (requests[1], lambda: None)])
    assert first.shared == [[0]] and work.blame() == [requests[0]]
    ended = list[int]()
    work = GrammarWork(Ranks(1, [0]))
    with pytest.raises(GrammarTooSlow):
        work.run([(requests[0], endless), (requests[1], lambda: ended.append(1))])
    assert work.blame() == [requests[0]] and ended == [1]
    # What only this rank finds slow is waited for.
    monkeypatch.setattr(grammar_work, "MAX_SECONDS", -1.0)
    work = GrammarWork(Ranks(1, []))
    work.run([(requests[0], lambda: ended.append(0)), (requests[1], lambda: ended.append(1))])
    assert sorted(ended) == [0, 1, 1]


def test_threads_end_with_what_they_work_for_and_keep_nothing() -> None:
    (request,), work, threads = requests_of("a"), GrammarWork(), list[Thread]()
    assert request.grammar is not None
    kept = weakref.ref(request.grammar)
    work.run([(request, lambda: threads.append(current_thread()))])
    del request
    wait_for(lambda: kept() is None)
    assert threads[0].is_alive()
    del work
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()
