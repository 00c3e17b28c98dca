"""Pages in host memory: what comes back is what was evicted, and every place is accounted for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.executor.paged_cache_driver import Driver, RandomUse
from tests.models.helpers import save_checkpoint
from tllm_spec import LLM, KvCacheConfig
from tllm_spec.executor.resources.host_pages import HostPages

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
