"""The KV cache of requests, with draft layers in its pages: which tokens the pages of a request are
cached under."""

import pytest
import torch

from tests.executor.one_group import manager_of
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.sampling_params import SamplingParams

RULES = DecodingRules.from_params(SamplingParams(), vocab_size=64, end_ids=(), encode=None)
PAGE_SIZE = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]  # two full pages


class Bench:
    def __init__(self, lookahead: int) -> None:
        cpu = torch.device("cpu")
        geometry = AttentionGeometry(1, 1, 1, 1, 1.0)
        pool = KVPool(
            geometry,
            num_pages=20,
            page_size=PAGE_SIZE,
            kv_format=KVFormat(torch.float32),
            device=cpu,
        )
        self.slots = SeqSlotManager(4)
        self.kv = manager_of(pool, BlockTable(self.slots, 10, cpu), lookahead)
        self.cache = self.kv.cache
        self._num_requests = 0

    def prefill(self, tokens: list[int], chunk: int, sampled: int | None = None) -> LlmRequest:
        """A request after the context round that computed `chunk` tokens, and sampled a token if it
        was the last."""
        self._num_requests += 1
        request = LlmRequest(self._num_requests, list(tokens), RULES, seed=0)
        self.slots.acquire(request)
        self.kv.start(request)
        assert self.kv.extend(request, chunk)
        request.kv_len = chunk
        request.tokens += [] if sampled is None else [sampled]
        self.kv.update_resources(ScheduledBatch(context_requests=[request]))
        return request

    def finish(self, request: LlmRequest, *generated: int) -> None:
        """Accepts a run, of which the last token is never computed, and ends the request as the
        loop does."""
        request.tokens += generated
        assert self.kv.extend(request, request.num_tokens + 3)
        self.kv.rewind(request, request.num_tokens - 1)
        request.kv_len = request.num_tokens - 1
        self.kv.free_resources(request)
        self.kv.check_integrity()


def test_a_finished_context_is_cached_under_its_prompt_and_the_sampled_token() -> None:
    for lookahead, after_another_token in [(0, 8), (1, 7)]:
        bench = Bench(lookahead)
        bench.prefill(PROMPT, 8, sampled=20)
        assert bench.cache.match([*PROMPT, 20]) == 8
        assert bench.cache.match([*PROMPT, 30]) == after_another_token


def test_a_context_chunk_is_cached_under_its_tokens_and_the_next_one_of_the_prompt() -> None:
    for lookahead, after_another_token in [(0, 4), (1, 3)]:
        bench = Bench(lookahead)
        bench.prefill(PROMPT, 4)
        assert bench.cache.match(PROMPT) == 4
        assert bench.cache.match([*PROMPT[:4], 30]) == after_another_token


def test_two_samples_of_a_prompt_keep_their_own_last_prompt_page() -> None:
    bench = Bench(lookahead=1)
    first, second = bench.prefill(PROMPT, 8, sampled=20), bench.prefill(PROMPT, 8, sampled=30)
    pages = [bench.cache.pages(request.request_id) for request in (first, second)]
    assert pages[0][0] == pages[1][0] and pages[0][1] != pages[1][1]
    bench.finish(first, 21)
    bench.finish(second, 31)
    assert bench.cache.match([*PROMPT, 20, 21, 9]) == bench.cache.match([*PROMPT, 30, 31, 9]) == 9


def test_a_finished_request_is_cached_up_to_its_last_token_which_belongs_to_the_key_only() -> None:
    for lookahead, after_another_token in [(0, 12), (1, 11)]:
        bench = Bench(lookahead)
        bench.finish(bench.prefill(PROMPT, 8, sampled=20), 21, 22, 23, 24)
        known = [*PROMPT, 20, 21, 22, 23]
        assert bench.cache.match([*known, 24, 25]) == 12
        assert bench.cache.match([*known, 40, 41]) == after_another_token


def test_a_request_that_failed_or_computed_nothing_leaves_nothing_to_reuse() -> None:
    bench = Bench(lookahead=1)
    failed, idle = bench.prefill(PROMPT, 3), bench.prefill(PROMPT, 0)
    failed.finish("error", error="broken")
    for request in (failed, idle):
        bench.kv.free_resources(request)
    assert bench.cache.match(PROMPT) == 0
    bench.kv.check_integrity()


def test_pages_that_change_hands_reach_the_device() -> None:
    """A page given back is taken by a neighbour, and its first owner goes on with another one."""
    bench = Bench(lookahead=0)
    first, second = bench.prefill([1, 2, 3], 3, sampled=9), bench.prefill([4, 5, 6], 3, sampled=9)
    bench.kv.groups[0].table.flush()
    for number in range(4, 28, 4):
        for owner, other in ((first, second), (second, first)):
            assert bench.kv.extend(owner, number + 1)
            bench.kv.groups[0].table.flush()
            bench.kv.rewind(owner, number)
            assert bench.kv.extend(other, number + 1)
            assert bench.kv.extend(owner, number + 1)
            bench.kv.groups[0].table.flush()
            for request in (first, second):
                pages = bench.cache.pages(request.request_id)
                assert (
                    bench.kv.groups[0].table.device_rows[request.slot, : len(pages)].tolist()
                    == pages
                )
    bench.kv.check_integrity()


@pytest.mark.parametrize("max_pages", [5, 6])
def test_the_device_is_sent_the_latest_pages_from_the_first_changed_pair_on(max_pages: int) -> None:
    table, last = BlockTable(SeqSlotManager(2), max_pages, torch.device("cpu")), 2**31 - 1
    table.device_rows.fill_(99)
    table.write(0, [5, 6, 7], 0)
    table.write(1, [1, 2, 8, 9, 4], 3)
    table.write(0, [5, 6, last, last], 2)
    table.flush()
    expected = [[5, 6, last, last, 99, 99], [99, 99, 8, 9, 4, 0], [99] * 6]
    assert table.device_rows.tolist() == expected
    table.write(1, [1, 2, 8, 9, 4, 3], 5)
    table.flush()
    assert table.device_rows[1].tolist() == [99, 99, 8, 9, 4, 3]
    table.device_rows.zero_()
    table.flush()
    assert not table.device_rows.any(), "what was sent is sent again"


def test_room_counts_tokens_in_flight_and_those_of_the_next_round() -> None:
    bench = Bench(lookahead=0)
    request = bench.prefill([1, 2, 3], 3, sampled=9)  # one page of four
    request.tokens_in_flight = 3
    assert bench.kv.extend(request, 8)
    assert bench.kv.without_room([request], 1) == []
    assert bench.kv.without_room([request], 2) == [request]
