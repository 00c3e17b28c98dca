"""The KV cache of requests, with draft layers in its pages: which tokens the pages of a request are
cached under."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import one_model
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.one_group import manager_of
from tests.executor.paged_cache_driver import Driver, RandomUse
from tests.models.helpers import random_tokens, save_checkpoint
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec import LLM, KvCacheConfig
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import DecodingRules, LlmRequest, RequestState
from tllm_spec.executor.resources.host_pages import HostPages
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.kernels.attention.visible_keys import KeySpan
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


# Pages in host memory: what comes back is what was evicted, and every place is accounted for.


PAGE = 4


class SimulatedCopies:
    """Host memory of the driver's simulated device."""

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.kv: dict[int, list[list[int | None]]] = {}

    def save(self, pages: Sequence[int], place: int) -> None:
        assert self.driver is not None
        devices = zip(self.driver.devices, pages, strict=True)
        self.kv[place] = [list(device.kv[page]) for device, page in devices]

    def load(self, place: int, pages: Sequence[int]) -> None:
        assert self.driver is not None
        saved = zip(self.driver.devices, pages, self.kv[place], strict=True)
        for device, page, values in saved:
            device.kv[page] = list(values)


def with_host(num_places: int) -> tuple[HostPages, SimulatedCopies]:
    copies = SimulatedCopies()
    return HostPages(num_places, copies), copies


def driver_of(num_pages: int, num_places: int, **options: Any) -> tuple[Driver, HostPages]:
    host, copies = with_host(num_places)
    driver = copies.driver = Driver(num_pages, PAGE, host=host, **options)
    return driver, host


def test_a_prefix_that_was_evicted_comes_back_page_by_page() -> None:
    driver, host = driver_of(9, 6)
    prompt = list(range(26))
    driver.run(prompt)
    driver.run([50 + each for each in range(30)])  # evicts all but what has no page to itself
    assert driver.cache.match(prompt) == 0 and host.num_saved == 6
    driver.cache.restore(prompt)
    assert driver.cache.match(prompt) == 24 and host.num_loaded == 6
    driver.free(driver.begin(prompt))  # the driver checks what the pages hold
    driver.check()
    driver.cache.restore(prompt)
    assert host.num_loaded == 6  # they are on the device
    driver.cache.reset()
    driver.check()
    driver.cache.restore(prompt)
    assert driver.cache.match(prompt) == 0


def test_only_requests_with_the_same_salt_and_weights_get_a_page_back() -> None:
    driver, host = driver_of(9, 8)
    cache, prompt = driver.cache, list(range(17))

    def run(tokens: list[int], salt: str | None) -> None:
        cache.add_sequence(1, tokens, salt)
        assert cache.extend(1, len(tokens))
        cache.free(1, tokens)

    run(prompt, "a")
    run([50 + each for each in range(32)], None)
    assert host.num_saved == 4
    for salt in (None, "b"):
        cache.restore(prompt, salt)
    assert host.num_loaded == 0
    cache.restore(prompt, "a")
    assert host.num_loaded == 4 and cache.match(prompt, "a") == 16
    cache.start_version(1)
    cache.restore(prompt, "a")
    assert host.num_loaded == 4
    driver.check()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("page_size", "num_pages", "num_places"), [(1, 20, 9), (2, 8, 30)])
def test_every_sequence_sees_its_own_tokens_whatever_leaves_and_comes_back(
    page_size: int, num_pages: int, num_places: int, lookahead: int
) -> None:
    host, copies = with_host(num_places)

    class Restoring(RandomUse):
        def start(self) -> None:
            prompt = self.text(self.rng.randint(0, self.longest))
            cache = self.driver.cache
            needed = cache.new_pages_needed(prompt, len(prompt))
            available, matched = self.driver.available(), cache.match(prompt)
            cache.restore(prompt)
            assert self.driver.available() == available and cache.match(prompt) >= matched
            assert cache.new_pages_needed(prompt, len(prompt)) <= needed
            self.driver.start(prompt, self.rng.randint(0, len(prompt)))

        def claim_everything(self) -> None:
            """The host is not copied."""

    use = Restoring(page_size, num_pages, partial_reuse=True, lookahead=lookahead, host=host)
    copies.driver = use.driver
    for _ in range(1500):
        use.step()
    assert host.num_saved > 30 and host.num_loaded > 10


def test_what_could_not_be_kept_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="enable_block_reuse is false: leave one of them out"):
        KvCacheConfig(host_cache_size=1, enable_block_reuse=False)
    assert KvCacheConfig(host_cache_size=None).host_cache_size == 0
    for size, sentence in ((10, r"is less than a page, \d+ bytes"), (1 << 50, "the machine has")):
        with pytest.raises(ValueError, match=f"host_cache_size = {size}:? {sentence}"):
            LLM("zoo:llama", load_format="dummy", kv_cache_config={"host_cache_size": size})


def test_a_model_that_sees_a_window_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Mistral", max_position_embeddings=512, sliding_window=32)
    with pytest.raises(ValueError, match="only where every layer keeps all keys"):
        LLM(
            tmp_path,
            skip_tokenizer_init=True,
            max_seq_len=256,
            kv_cache_config={"host_cache_size": 1 << 20},
        )


# Pages of layers with a sliding window: how many a request holds while it grows far beyond the
# window, where a hit ends, and what becomes of the pages that leave it.


WINDOW, SLIDING_PAGES_PAGE_SIZE = 8, 4
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
SMALL_PAGES = {"tokens_per_block": SLIDING_PAGES_PAGE_SIZE}


@pytest.fixture(params=MODELS)
def sliding(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = {"max_position_embeddings": 512, "sliding_window": WINDOW}
    save_checkpoint(tmp_path, request.param, **(options | MODELS[request.param]))
    return tmp_path


def held_by(harness: Harness, request: LlmRequest) -> list[int]:
    """Pages of each group with a window."""
    kv = harness.parts.kv
    pairs = zip(kv.held(request), kv.cache.groups, strict=True)
    return [held for held, group in pairs if group.span is not None]


@pytest.mark.parametrize(
    "mode", ["plain", "draft_target_two_model", "draft_target", "eagle3", "eagle3_tree"]
)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.thinned(8)
def test_a_request_holds_few_pages_however_long_it_gets(
    overlap: bool, mode: str, sliding: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2, **sizes)
    options = one_model(sliding, head, mode) | {"disable_overlap_scheduler": not overlap}
    harness = Harness(sliding, max_seq_len=400, kv_cache_config=SMALL_PAGES, **options)
    requests = [harness.submit(random_tokens(70, seed=i), max_tokens=200) for i in range(2)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.round()
    kv, most = harness.parts.kv, 0
    limit = kv._room_of_span.most_pages(KeySpan(WINDOW, slides=True), generates=True)
    assert limit < 270 // SLIDING_PAGES_PAGE_SIZE // 2
    while harness.round():
        harness.executor.check_integrity()
        for request in requests:
            if request.state is RequestState.GENERATION:
                most = max(most, *held_by(harness, request))
    assert WINDOW // SLIDING_PAGES_PAGE_SIZE <= most <= limit
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned
def test_a_pool_much_smaller_than_the_texts_serves_several_at_once(sliding: Path) -> None:
    """GUARANTEED_NO_EVICT admits by what requests hold at once."""
    own = {"max_tokens": 4 * 100} | SMALL_PAGES
    options = {"max_num_tokens": 16, "enable_chunked_prefill": True, "max_seq_len": 400}
    alone, plain = [], Harness(sliding, kv_cache_config=SMALL_PAGES, **options)
    for seed in range(4):
        alone.append(plain.submit(random_tokens(60, seed=seed), max_tokens=250))
    plain.run()
    harness = Harness(sliding, kv_cache_config=own, **options)
    requests = [harness.submit(random_tokens(60, seed=i), max_tokens=250) for i in range(4)]
    most_running = 0
    while harness.round():
        most_running = max(most_running, len(harness.parts.scheduler.running))
    assert list(map(output_of, requests)) == list(map(output_of, alone))
    has_full_group = any(own.span is None for own in harness.parts.kv.cache.groups)
    assert most_running == (1 if has_full_group else 4)


def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended(sliding: Path) -> None:
    harness = Harness(sliding, kv_cache_config=SMALL_PAGES)
    first = harness.submit(random_tokens(50), max_tokens=60)
    harness.run()
    second = harness.submit([*first.tokens, 5, 6, 7], max_tokens=20)
    harness.run()
    assert second.cached_tokens == len(first.tokens) - 1
    fresh = Harness(sliding, kv_cache_config=SMALL_PAGES | {"enable_block_reuse": False})
    again = fresh.submit([*first.tokens, 5, 6, 7], max_tokens=20)
    fresh.run()
    assert output_of(second) == output_of(again)


def test_a_prompt_that_shares_a_beginning_with_a_longer_one_finds_it(sliding: Path) -> None:
    """Its pages have left the window, and are cached."""
    harness = Harness(sliding, kv_cache_config=SMALL_PAGES)
    common = random_tokens(40)
    harness.submit([*common, *random_tokens(60, seed=1)], max_tokens=4)
    harness.run()
    other = harness.submit([*common, *random_tokens(9, seed=2)], max_tokens=4)
    harness.run()
    assert other.cached_tokens == 40


ALL_AND_A_WINDOW = [None, KeySpan(WINDOW, slides=True)]


def test_pages_that_leave_the_window_are_cached_if_stored_and_free_if_not() -> None:
    driver = Driver(num_pages=20, page_size=SLIDING_PAGES_PAGE_SIZE, spans=ALL_AND_A_WINDOW)
    seq_id = driver.begin(random_tokens(32))
    driver.store(seq_id, 16)
    free, counts = 19 - 8, driver.cache.state()["groups"]
    assert [own["free"] for own in counts] == [free, free]
    driver.slide(seq_id)  # position 32 sees the keys from 25 on: six pages leave
    counts = driver.cache.state()["groups"]
    assert [own["cached"] for own in counts] == [0, 4]
    assert [own["free"] for own in counts] == [free, free + 2]
    assert [own["used"] for own in counts] == [8, 2]
    driver.check()


def test_a_hit_ends_where_every_group_can_resume() -> None:
    driver = Driver(num_pages=40, page_size=SLIDING_PAGES_PAGE_SIZE, spans=ALL_AND_A_WINDOW)
    text = random_tokens(32)
    driver.run(text)
    assert driver.cache.match([*text, 1]) == 32
    # The window's pages of the tokens 24 to 27, the last but one; the others stay.
    tree = driver.cache._tree
    nodes = tree.match(tree.root, text, 32)
    tree._evictable[1].move_to_end(nodes[6], last=False)
    driver.cache._give_back(tree.evict(1))
    driver.check()
    # After 28 tokens position 21 is the first to be seen; 24 tokens need no page that is gone.
    assert driver.cache.match([*text, 1]) == 24
    assert driver.cache.match(text[:26]) == 24
    seq_id = driver.begin([*text, 1])
    driver.free(seq_id)
    assert driver.cache.match([*text, 1, 2]) == 33, "the missing page was not stored again"
    driver.check()


def test_a_page_of_the_window_is_evicted_alone_and_a_page_of_all_keys_with_it() -> None:
    driver = Driver(num_pages=12, page_size=SLIDING_PAGES_PAGE_SIZE, spans=ALL_AND_A_WINDOW)
    driver.run(random_tokens(32))
    cache = driver.cache
    assert [cache.available(group) for group in (0, 1)] == [11, 11]
    cache._give_back(cache._tree.evict(1))
    assert [len(free) for free in cache._free_pages] == [3, 4]
    cache._give_back(cache._tree.evict(0))  # the leaf, whose window page is the one that went
    assert [len(free) for free in cache._free_pages] == [4, 4]
    cache._give_back(cache._tree.evict(0))
    assert [len(free) for free in cache._free_pages] == [5, 5]
    driver.check()
