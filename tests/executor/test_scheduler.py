"""Clients take turns: many requests of one delay another one's by one turn."""

from dataclasses import replace
from random import Random
from typing import Any

import msgpack
import pytest
import torch

from tests.executor.one_group import all_are_free, manager_of
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.request_wire import RequestLimits, pack_requests, unpack_requests
from tllm_spec.executor.resources.interface import BlockTable, ResourceManager, SeqSlotManager
from tllm_spec.executor.scheduler import FAIR_PREEMPTION_ROUNDS, Scheduler, SchedulerLimits
from tllm_spec.sampling_params import SamplingParams

PAGE_SIZE = 4
RULES = DecodingRules.from_params(SamplingParams(), vocab_size=64, end_ids=(), encode=None)


class Released(ResourceManager):
    """A third manager, next to slots and pages."""

    def __init__(self) -> None:
        self.request_ids: list[int] = []

    def free_resources(self, request: LlmRequest) -> None:
        self.request_ids.append(request.request_id)


class Bench:
    """A scheduler with real slots and pages, and what the loop does around it."""

    def __init__(
        self,
        num_pages: int = 100,
        max_batch_size: int = 8,
        draft_len: int = 0,
        max_pages_per_request: int = 50,
        **changed: Any,
    ) -> None:
        usual = SchedulerLimits(
            1000, draft_len, chunked_prefill=False, may_preempt=False, by_priority=False
        )
        self.slots = SeqSlotManager(max_batch_size)
        pool = KVPool(
            AttentionGeometry(1, 1, 1, 1, 1.0),
            num_pages=num_pages + 1,
            page_size=PAGE_SIZE,
            kv_format=KVFormat(torch.float32),
            device=torch.device("cpu"),
        )
        cpu = torch.device("cpu")
        self.kv = manager_of(pool, BlockTable(self.slots, max_pages_per_request, cpu))
        self.other = Released()
        self.resources = [self.other, self.kv, self.slots]
        self.scheduler = Scheduler(replace(usual, **changed), self.slots, self.kv, self.resources)
        self.draft_len = draft_len
        self.num_rows = 0  # of the latest round's forward
        self._num_requests = 0

    def add(
        self,
        prompt_len: int,
        max_tokens: int = 8,
        priority: float = 0.5,
        shared: int = 0,
        client: tuple[str, ...] = (),
    ) -> LlmRequest:
        """Prompts begin with `shared` equal tokens and have no other in common."""
        self._num_requests += 1
        number = self._num_requests
        tokens = [0] * shared + [number] * prompt_len
        request = LlmRequest(
            number, tokens, RULES, seed=0, max_tokens=max_tokens, arrival=number, priority=priority
        )
        request.client = client
        self.scheduler.add(request)
        return request

    def round(self, accepted: int = 0) -> ScheduledBatch:
        """Schedules, then lets every scheduled request have its tokens: `accepted` drafts and one
        more."""
        for request in self.scheduler.running:
            if request.state is RequestState.GENERATION:
                request.py_draft_tokens = [0] * self.draft_len
        batch, _ = self.scheduler.schedule(self.scheduler.generating(), chain_of(self.draft_len))
        done = ScheduledBatch(list(batch.context_requests), list(batch.generation_requests))
        self.num_rows = sum(
            1 + len(request.py_draft_tokens) for request in batch.generation_requests
        )
        self.num_rows += sum(request.context_chunk for request in batch.context_requests)
        last = batch.last_chunk_requests
        for request in batch.context_requests:
            request.kv_len, request.context_chunk = request.kv_len + request.context_chunk, 0
        for request in last:
            request.state = RequestState.GENERATION
            request.append_run([63])
        for request in batch.generation_requests:
            before = request.num_tokens
            request.append_run([63] * (1 + accepted))
            request.kv_len += request.num_tokens - before
        self.kv.update_resources(done)
        for request in done.requests():
            if request.is_finished:
                request.kv_len = min(request.kv_len, request.num_tokens - 1)
                self.scheduler.remove(request)
                for manager in self.resources:
                    manager.free_resources(request)
        self.kv.check_integrity()
        self.slots.check_integrity()
        return done


def test_a_prompt_that_does_not_fit_the_rest_of_the_budget_waits_whole() -> None:
    bench = Bench(max_num_tokens=20)
    first, second = bench.add(15), bench.add(15)
    assert bench.round().context_requests == [first]
    batch = bench.round()
    assert batch.generation_requests == [first] and batch.context_requests == [second]


def test_a_prompt_that_waits_for_the_token_budget_takes_nothing_and_is_counted_once() -> None:
    bench = Bench(max_num_tokens=20, draft_len=3)
    bench.add(6, max_tokens=1, shared=6)
    bench.round()
    running = [bench.add(2, max_tokens=10) for _ in range(2)]
    bench.round()
    before = replace(bench.kv.cache.stats)
    # Cached are a full page and two tokens of one to be copied; whole pages are reported.
    waiting = bench.add(13, shared=6)
    while not running[0].is_finished:
        assert bench.round().generation_requests == running  # 8 rows of the budget of 20
        assert bench.kv.cache.stats == before and waiting.slot < 0
    assert bench.round().context_requests == [waiting]
    found = bench.kv.cache.stats
    assert (found.missed_tokens - before.missed_tokens, found.copied_pages) == (15, 1)


def test_with_chunked_prefill_a_prompt_takes_the_rest_of_the_budget_round_by_round() -> None:
    bench = Bench(max_num_tokens=20, chunked_prefill=True)
    first, second = bench.add(15), bench.add(30)
    bench.round()
    assert (first.state, second.state, second.kv_len) == (
        RequestState.GENERATION,
        RequestState.CONTEXT,
        5,
    )
    batch = bench.round()
    assert batch.generation_requests == [first] and second.kv_len == 5 + 19
    bench.round()
    assert second.state is RequestState.GENERATION and second.kv_len == 30


def test_drafts_count_as_tokens_of_the_budget() -> None:
    bench = Bench(max_num_tokens=20, chunked_prefill=True, draft_len=4)
    for _ in range(3):
        bench.add(5)
    bench.round()
    late = bench.add(40)
    bench.round()
    assert late.kv_len == 20 - 3 * 5


def test_adding_to_a_long_queue_compares_with_few_of_its_requests() -> None:
    bench, number = Bench(by_priority=True), 1000
    rank, looks = bench.scheduler._rank, list[LlmRequest]()

    def counted(request: LlmRequest) -> tuple[float, int]:
        looks.append(request)
        return rank(request)

    bench.scheduler.waiting._rank = counted
    random = Random(0)
    for _ in range(number):
        bench.add(2, priority=random.random())
    assert len(looks) < number * 14  # log2(1000) is 10
    waiting = list(bench.scheduler.waiting)
    assert waiting == sorted(waiting, key=rank)


def test_nothing_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(max_num_tokens=20)
    running, large, small = bench.add(10), bench.add(15), bench.add(2)
    assert bench.round().requests() == [running]
    assert bench.round().context_requests == [large, small]


def test_the_highest_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    for by_priority, order in ((False, [1, 2, 3, 4]), (True, [3, 2, 4, 1])):
        bench = Bench(max_batch_size=1, by_priority=by_priority)
        for priority in (0.1, 0.5, 0.9, 0.5):
            bench.add(5, max_tokens=1, priority=priority)
        assert [bench.round().requests()[0].request_id for _ in range(4)] == order


def test_no_more_requests_run_than_there_are_slots() -> None:
    bench = Bench(max_batch_size=2)
    requests = [bench.add(5, max_tokens=3) for _ in range(5)]
    seen = []
    while bench.scheduler.running or bench.scheduler.waiting:
        seen.append(len(bench.round().requests()))
    assert max(seen) == 2 and all(request.finish_reason == "length" for request in requests)


def test_guaranteed_no_evict_admits_a_request_only_if_all_its_tokens_fit() -> None:
    bench = Bench(num_pages=10, draft_len=2)  # each request may need 4 + 10 + 2 tokens: 4 pages
    first, second, third = (bench.add(4, max_tokens=10) for _ in range(3))
    assert bench.round().requests() == [first, second]
    while not first.is_finished:
        bench.round()
    assert third.state is RequestState.WAITING and third in bench.round().requests()


def test_max_utilization_admits_what_fits_now_and_preempts_the_youngest_request() -> None:
    bench = Bench(num_pages=6, may_preempt=True)
    first, second = bench.add(8, max_tokens=16), bench.add(8, max_tokens=16)
    assert bench.round().requests() == [first, second]
    while not bench.scheduler.num_preemptions:
        bench.round()
    assert second.state is RequestState.WAITING and second.num_preemptions == 1
    assert (second.slot, second.kv_len, bench.kv.holds(second)) == (-1, 0, False)
    assert bench.other.request_ids == [
        second.request_id
    ]  # every manager is told, not only slots and pages
    grown = second.num_tokens
    assert grown > 8
    while second.state is RequestState.WAITING:
        bench.round()
    assert first.is_finished
    assert second.num_tokens == grown + 1 and second.tokens == [2] * 8 + [63] * (grown - 7)


def test_a_preempted_request_may_be_longer_than_the_budget_and_is_then_cut() -> None:
    bench = Bench(num_pages=8, max_num_tokens=9, may_preempt=True)
    first, second = bench.add(4, max_tokens=26), bench.add(4, max_tokens=26)
    while not (first.is_finished and second.is_finished):
        bench.round()
    assert second.num_preemptions and second.num_output_tokens == 26


@pytest.mark.parametrize("by_priority", [False, True])
def test_the_request_of_the_lowest_rank_is_preempted(by_priority: bool) -> None:
    bench = Bench(num_pages=10, may_preempt=True, by_priority=by_priority)
    requests = [bench.add(8, max_tokens=12, priority=priority) for priority in (0.2, 0.8, 0.4)]
    while not bench.scheduler.num_preemptions:
        bench.round()
    victims = [request.request_id for request in requests if request.num_preemptions]
    assert victims == ([1] if by_priority else [3])


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (30, 20, "are 50 tokens, and the KV cache has room for 40"),
        (21, 2, "the prompt has 21 tokens and max_num_tokens is 20"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_option_to_change(
    prompt_len: int, max_tokens: int, message: str
) -> None:
    bench = Bench(num_pages=10, max_num_tokens=20)
    with pytest.raises(ValueError, match=message):
        bench.add(prompt_len, max_tokens)
    assert not bench.scheduler.waiting


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("may_preempt", [False, True])
def test_under_random_traffic_budgets_hold_and_every_request_gets_all_its_tokens(
    may_preempt: bool, seed: int
) -> None:
    random = Random(seed)
    draft_len, budget = random.randrange(4), random.randrange(24, 40)
    bench = Bench(
        24, 5, draft_len, may_preempt=may_preempt, chunked_prefill=True, max_num_tokens=budget
    )
    requests: list[LlmRequest] = []
    for _ in range(600):
        if len(requests) < 30 and random.random() < 0.2:
            requests.append(
                bench.add(
                    random.randrange(1, 30), random.randrange(1, 40), shared=random.randrange(16)
                )
            )
        batch = bench.round(random.randrange(draft_len + 1))
        assert bench.num_rows <= budget and len(batch.requests()) <= 5
    assert len(requests) == 30
    assert [request.num_output_tokens for request in requests] == [
        request.max_tokens for request in requests
    ]
    assert may_preempt == (bench.scheduler.num_preemptions > 0)
    assert all_are_free(bench.kv) and len(bench.slots.free) == 5


def rounds_until_it_runs(bench: Bench, request: LlmRequest) -> int:
    for number in range(3000):
        if request.state is not RequestState.WAITING:
            return number
        bench.round()
    raise AssertionError("it never runs")


def order(bench: Bench, requests: list[LlmRequest]) -> list[int]:
    """The indices of the requests in the order in which they join, one at a time."""
    joined: list[int] = []
    while len(joined) < len(requests):
        bench.round()
        joined += [
            index
            for index, request in enumerate(requests)
            if index not in joined and request.state is not RequestState.WAITING
        ]
    return joined


def flooded(bench: Bench) -> list[LlmRequest]:
    requests = [bench.add(4, 2000, client=("A",)) for _ in range(60)]
    bench.round()
    assert len(bench.scheduler.running) == 4
    return requests


def test_a_short_request_behind_sixty_long_ones_starts_at_the_first_slot_that_ends() -> None:
    bench = Bench(num_pages=4000, max_batch_size=4, max_pages_per_request=600)
    flood = flooded(bench)
    late = bench.add(4, 16, client=("B",))
    while not any(request.is_finished for request in flood):
        assert late.state is RequestState.WAITING
        bench.round()
    assert late in bench.round().requests()
    assert sum(request.state is not RequestState.WAITING for request in flood) <= 4 + 3


def test_with_fair_preemption_it_starts_at_once_and_costs_the_flood_its_newest_request() -> None:
    limits = {"may_preempt": True, "fair_preemption": True}
    bench = Bench(num_pages=4000, max_batch_size=4, max_pages_per_request=600, **limits)
    flood = flooded(bench)
    for _ in range(10):
        bench.round()
    victim, before = flood[3], list(flood[3].tokens)
    first = bench.add(4, 16, client=("B",))
    assert rounds_until_it_runs(bench, first) == 1
    assert [request.num_preemptions for request in flood[:4]] == [0, 0, 0, 1]
    second = bench.add(4, 16, client=("C",))
    while not first.is_finished:
        bench.round()
    assert second.num_output_tokens or rounds_until_it_runs(bench, second) == 1
    while victim.state is RequestState.WAITING:
        bench.round()
    assert victim.tokens[: len(before)] == before
    third = bench.add(4, 16, client=("D",))
    assert rounds_until_it_runs(bench, third) <= FAIR_PREEMPTION_ROUNDS
    assert bench.scheduler.num_preemptions <= 3


def test_no_client_gives_up_a_request_to_one_that_has_as_many() -> None:
    bench = Bench(max_batch_size=2, may_preempt=True, fair_preemption=True)
    requests = [bench.add(4, 100, client=(name,)) for name in "ABABC"]
    for _ in range(FAIR_PREEMPTION_ROUNDS + 10):
        bench.round()
    assert bench.scheduler.running == requests[:2] and not bench.scheduler.num_preemptions


def test_when_pages_run_out_the_client_with_most_requests_gives_up_its_newest() -> None:
    limits = {"may_preempt": True, "fair_preemption": True}
    bench = Bench(num_pages=12, **limits)
    requests = [bench.add(8, 12, client=(name,)) for name in "AAB"]
    while not bench.scheduler.num_preemptions:
        bench.round()
    assert [request.num_preemptions for request in requests] == [0, 1, 0]


def test_clients_take_turns_and_each_ones_requests_go_oldest_first() -> None:
    bench = Bench(max_batch_size=1)
    requests = [bench.add(4, 1, client=(name,)) for name in "AAABBC"]
    assert order(bench, requests) == [0, 3, 5, 1, 4, 2]


def test_clients_of_a_group_share_its_turns() -> None:
    bench = Bench(max_batch_size=1)
    clients = [("A", "1"), ("A", "2"), ("A", "3"), ("A", "1"), ("B", "1"), ("B", "1")]
    requests = [bench.add(4, 1, client=client) for client in clients]
    assert order(bench, requests) == [0, 4, 1, 5, 2, 3]


def test_a_client_that_is_alone_has_its_requests_served_in_order_of_arrival() -> None:
    for client in ((), ("A",), ("A", "u")):
        bench = Bench(max_batch_size=1)
        requests = [bench.add(4, 1, client=client) for _ in range(5)]
        assert order(bench, requests) == [0, 1, 2, 3, 4]


def test_a_higher_priority_comes_before_turns() -> None:
    bench = Bench(max_batch_size=1, by_priority=True)
    given = [("A", 0.5), ("A", 0.9), ("A", 0.9), ("B", 0.5), ("C", 0.1)]
    requests = [bench.add(4, 1, priority, client=(name,)) for name, priority in given]
    assert order(bench, requests) == [1, 2, 3, 0, 4]


def test_new_clients_do_not_keep_a_large_request_waiting_for_ever() -> None:
    bench = Bench(num_pages=10, max_batch_size=8)
    small = [bench.add(4, 12, client=("A",))]
    bench.add(4, 1, client=("B",))  # had its turn
    large = bench.add(20, 20, client=("B",))
    bench.round()
    number = 0
    while large.state is RequestState.WAITING:
        number += 1
        small.append(bench.add(4, 12, client=(f"new {number}",)))
        bench.round()
        assert number < 30
    assert not any(request.num_output_tokens for request in small[1:])


def test_client_and_salt_reach_another_process() -> None:
    request = LlmRequest(7, [1, 2], RULES, seed=3, client=("A", "u"), cache_salt="s")
    packed = msgpack.unpackb(msgpack.packb(pack_requests([request])), strict_map_key=False)
    limits = RequestLimits(64, (), 100, 0, None)
    (found,) = unpack_requests(packed, [8], limits, [None])
    assert (found.client, found.cache_salt) == (("A", "u"), "s")


@pytest.mark.parametrize("seed", range(4))
def test_under_random_traffic_of_several_clients_every_request_gets_all_its_tokens(
    seed: int,
) -> None:
    random = Random(seed)
    limits = {"may_preempt": True, "fair_preemption": True, "chunked_prefill": True}
    bench = Bench(24, 5, max_num_tokens=30, by_priority=bool(seed % 2), **limits)
    requests: list[LlmRequest] = []
    for _ in range(1200):
        if len(requests) < 40 and random.random() < 0.3:
            client = random.choice([("A", "1"), ("A", "2"), ("B", "1"), ("C",), ()])
            length = random.randrange(1, 30)
            priority = random.choice([0.2, 0.5])
            requests.append(bench.add(length, random.randrange(1, 40), priority, client=client))
        if requests and random.random() < 0.01:
            waiting = list(bench.scheduler.waiting)
            if waiting:
                bench.scheduler.remove(waiting[0])
                requests.remove(waiting[0])
        bench.round()
    assert len(requests) >= 25
    assert all(request.num_output_tokens == request.max_tokens for request in requests)
    assert bench.scheduler.num_preemptions
    waiting_requests = bench.scheduler.waiting
    assert not (waiting_requests._queues or waiting_requests._since)
    assert not waiting_requests._num_waiting
