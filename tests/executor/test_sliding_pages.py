"""Pages of layers with a sliding window: how many a request holds while it grows far beyond the
window, where a hit ends, and what becomes of the pages that leave it."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.paged_cache_driver import Driver
from tests.models.helpers import random_tokens, save_checkpoint
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.kernels.attention.visible_keys import KeySpan

WINDOW, PAGE_SIZE = 8, 4
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
}
SMALL_PAGES = {"tokens_per_block": PAGE_SIZE}


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


MODES: dict[str, Any] = {
    "plain": lambda folder, head: {},
    "draft model": lambda folder, head: draft_target(folder, 3),
    "draft model on the same pages": lambda folder, head: draft_target(
        folder, 3, draft_target_one_model=True
    ),
    "head": lambda folder, head: eagle3(head),
    "trees of a head": lambda folder, head: eagle3(
        head, use_dynamic_tree=True, dynamic_tree_max_topK=3
    ),
}


def eagle3(head: Path, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [0, 1], "max_draft_len": 3}
    return {"speculative_config": own | {"speculative_model": str(head)} | options}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.thinned(8)
def test_a_request_holds_few_pages_however_long_it_gets(
    overlap: bool, mode: str, sliding: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 128, "draft_vocab_size": 100}
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2, **sizes)
    options = MODES[mode](sliding, head) | {"disable_overlap_scheduler": not overlap}
    harness = Harness(sliding, max_seq_len=400, kv_cache_config=SMALL_PAGES, **options)
    requests = [harness.submit(random_tokens(70, seed=i), max_tokens=200) for i in range(2)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    harness.round()
    kv, most = harness.parts.kv, 0
    limit = kv._room_of_span.most_pages(KeySpan(WINDOW, slides=True), generates=True)
    assert limit < 270 // PAGE_SIZE // 2
    while harness.round():
        harness.executor.check_integrity()
        for request in requests:
            if request.state is RequestState.GENERATION:
                most = max(most, *held_by(harness, request))
    assert WINDOW // PAGE_SIZE <= most <= limit
    assert all_pages_are_back(harness.executor)


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
    driver = Driver(num_pages=20, page_size=PAGE_SIZE, spans=ALL_AND_A_WINDOW)
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
    driver = Driver(num_pages=40, page_size=PAGE_SIZE, spans=ALL_AND_A_WINDOW)
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
    driver = Driver(num_pages=12, page_size=PAGE_SIZE, spans=ALL_AND_A_WINDOW)
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
