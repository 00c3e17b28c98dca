"""Slots of LoRA adapters on the device: the least recently used one goes, requests without one
wait and never starve, and a request keeps the version of its adapter."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.tiny_adapters import LORA, NAMES, load, with_adapters, write_adapters
from tests.executor.harness import Harness, output_of
from tllm_spec.adapters.adapted import AdapterTables
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.lora_request import name_of_version

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ONE_SLOT = {"lora_config": LORA | {"max_loras": 1}}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), tiny)


@pytest.fixture(scope="module")
def others(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other contents under the same names."""
    return write_adapters(tmp_path_factory.mktemp("others"), tiny, seed=1)


@pytest.fixture(scope="module")
def alone(tiny: Path, adapters: Path, others: Path) -> dict[Any, list[int]]:
    """The output of PROMPT by adapter, and by the folder of the other contents."""
    found: dict[Any, list[int]] = {}
    for root in (others, adapters):
        harness = with_adapters(tiny, root)
        requests = {name: harness.submit(PROMPT, 20, adapter=name) for name in (None, *NAMES)}
        harness.run()
        found |= {(root, name): output_of(request) for name, request in requests.items()}
    return found


def on_device(harness: Harness) -> list[str]:
    """Names, least recently used first."""
    return [*map(name_of_version, harness.executor.state()["adapters"]["on_device"])]


def test_the_least_recently_used_adapter_gives_its_slot_up_and_comes_back(
    tiny: Path, adapters: Path, alone: dict[Any, list[int]]
) -> None:
    harness = with_adapters(tiny, adapters)
    for name, present in (("a", "a"), ("b", "ab"), ("a", "ba"), ("c", "ac"), ("b", "cb")):
        request = harness.submit(PROMPT, 20, adapter=name)
        harness.run()
        assert output_of(request) == alone[adapters, name]
        assert on_device(harness) == list(present)


def test_a_request_whose_adapter_finds_no_slot_waits_while_others_go_on(
    tiny: Path, adapters: Path, alone: dict[Any, list[int]]
) -> None:
    harness = with_adapters(tiny, adapters, **ONE_SLOT)
    first = harness.submit(PROMPT, 20, adapter="a")
    waiting = harness.submit(PROMPT, 20, adapter="b")
    free = harness.submit(PROMPT, 20)
    harness.rounds(4)
    state = harness.executor.state()["adapters"]
    assert (state["max"], state["running"], state["waiting"]) == (1, ["a"], ["b"])
    assert [each.state for each in (first, waiting, free)] == [
        RequestState.GENERATION,
        RequestState.WAITING,
        RequestState.GENERATION,
    ]
    harness.run()
    for request, name in ((first, "a"), (waiting, "b"), (free, None)):
        assert output_of(request) == alone[adapters, name]


@pytest.mark.parametrize("own_client", [False, True])
def test_a_waiting_adapter_gets_a_slot_however_many_requests_of_others_come(
    tiny: Path, adapters: Path, own_client: bool
) -> None:
    """own_client: the others' client has fewer running requests, so its turn is always first."""
    harness = with_adapters(tiny, adapters)

    def submit(name: str | None, tokens: int, client: str) -> LlmRequest:
        request = harness.submit(PROMPT, tokens, adapter=name)
        request.client = (client,)
        return request

    starving = "starving" if own_client else "one"
    if own_client:
        submit(None, 200, starving)
    stream = [submit(name, 8, "one") for name in "ababab"]
    harness.rounds(2)
    waiting = submit("c", 8, starving)
    for number in range(60):
        stream.append(submit("ab"[number % 2], 8, "one"))
        harness.round()
        if waiting.is_finished:
            break
    assert waiting.is_finished and not all(each.is_finished for each in stream)
    harness.run()
    assert not [each.error for each in (*stream, waiting) if each.error]


def test_an_adapter_that_is_unloaded_serves_its_requests_to_their_end_and_no_others(
    tiny: Path, adapters: Path, others: Path, alone: dict[Any, list[int]]
) -> None:
    harness = with_adapters(tiny, adapters)
    slots = harness.parts.adapters
    assert slots is not None
    running = [harness.submit(PROMPT, 20, adapter="a") for _ in range(2)]
    harness.rounds(5)
    slots.remove("a")
    late = harness.submit(PROMPT, 20, adapter="a")
    harness.rounds(2)
    assert late.error == "lora_name = 'a': no adapter with this name is loaded"
    assert on_device(harness) == ["a"]
    harness.executor.check_integrity()
    load(harness, others, "a")
    again = harness.submit(PROMPT, 20, adapter="a")
    harness.run()
    assert [output_of(each) for each in running] == [alone[adapters, "a"]] * 2
    assert output_of(again) == alone[others, "a"]
    assert len(on_device(harness)) == 1


def test_a_request_keeps_the_version_that_it_began_with_when_its_adapter_is_replaced(
    tiny: Path, adapters: Path, others: Path, alone: dict[Any, list[int]]
) -> None:
    reuse = {"tokens_per_block": 4}
    harness = with_adapters(tiny, adapters, **ONE_SLOT, kv_cache_config=reuse)
    with pytest.raises(ValueError, match=r"lora_name = 'a' is the adapter of .*replace = True"):
        load(harness, others, "a")
    running = harness.submit(PROMPT, 20, adapter="a")
    harness.rounds(1)
    waiting = harness.submit(PROMPT, 20, adapter="b")  # an older version waits for its slot, too
    harness.rounds(3)
    for name in "ab":
        load(harness, others, name, replace=True)
    new = {name: harness.submit(PROMPT, 20, adapter=name) for name in "ab"}
    harness.run()
    assert output_of(running) == alone[adapters, "a"]
    assert output_of(waiting) == alone[adapters, "b"]
    for name, request in new.items():
        assert output_of(request) == alone[others, name]
        assert request.cached_tokens == 0
    again = harness.submit(PROMPT, 20, adapter="a")
    harness.run()
    assert again.cached_tokens > 0 and output_of(again) == alone[others, "a"]


def test_a_round_that_fails_while_an_adapter_is_loaded_fails_its_requests_only(
    tiny: Path, adapters: Path, alone: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_adapters(tiny, adapters)
    running = harness.submit(PROMPT, 20, adapter="a")
    harness.rounds(3)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterTables, "load", lambda *_: 1 // 0)
        broken = harness.submit(PROMPT, 20, adapter="b")
        while not broken.is_finished:
            harness.round()
    again = harness.submit(PROMPT, 20, adapter="b")
    harness.run()
    assert broken.error == "ZeroDivisionError: integer division or modulo by zero"
    assert output_of(again) == alone[adapters, "b"]
    assert running.is_finished


def test_loaded_adapters_are_limited_and_one_that_a_request_has_loaded_makes_room(
    tiny: Path, adapters: Path
) -> None:
    harness = Harness(tiny, lora_config=LORA | {"max_cpu_loras": 2})
    load(harness, adapters, "a", from_request=True)
    load(harness, adapters, "b")
    running = harness.submit(PROMPT, 20, adapter="a")
    harness.rounds(2)
    with pytest.raises(ValueError, match="max_cpu_loras = 2 adapters are loaded"):
        load(harness, adapters, "c")
    harness.run()
    load(harness, adapters, "c")
    assert running.error is None
    assert set(harness.executor.state()["adapters"]["loaded"]) == {"b", "c"}
    harness.executor.check_integrity()


def test_a_slot_that_is_lost_or_used_twice_is_found(tiny: Path, adapters: Path) -> None:
    harness = with_adapters(tiny, adapters)
    slots = harness.parts.adapters
    assert slots is not None
    harness.executor.check_integrity()
    lost = slots._free.pop()
    with pytest.raises(AssertionError, match=r"1 free \+ 0 used adapter slots are not the 2"):
        harness.executor.check_integrity()
    slots._free += [lost, lost]
    with pytest.raises(AssertionError, match="adapter slots are not the 2"):
        harness.executor.check_integrity()
