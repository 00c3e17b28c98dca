"""Clients take turns: many requests of one delay another one's by one turn."""

from random import Random

import msgpack
import pytest

from tests.executor.test_scheduler import RULES, Bench
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.request_wire import RequestLimits, pack_requests, unpack_requests
from tllm_spec.executor.scheduler import FAIR_PREEMPTION_ROUNDS


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
