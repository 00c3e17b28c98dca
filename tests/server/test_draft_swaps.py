"""Draft weights of several engines: all of them swap, or none, also back."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.executor.test_draft_weights import Ended, copy_of
from tests.server.engine_thread import ARGS, PROMPT, WITHOUT_GRAMMARS, Engine
from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import LONG, SHORT, ServedProcess
from tests.server.test_replicas import CACHE
from tllm_spec import SamplingParams
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.server.engine_client import WORK_SECONDS
from tllm_spec.server.engine_process import with_served_draft
from tllm_spec.server.fleet import ServedWeights, weights_in_force
from tllm_spec.server.replicas import Replicas
from tllm_spec.text.tokenizer import load_tokenizer

FIRST = "zoo:llama-draft"
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=5)


class Fleet:
    """Two engines in threads, and fronts of them."""

    def __init__(self, folder: Path) -> None:
        self.engines = [
            Engine(folder, f"engine{number}", 0, WITHOUT_GRAMMARS) for number in range(2)
        ]
        self.paths = [engine.path for engine in self.engines]
        self.other = str(copy_of(FIRST, folder / "other", 0.9))

    @property
    def weights(self) -> list[DraftWeights]:
        found = [engine.process._executor.parts.draft_weights for engine in self.engines]
        return [each for each in found if each is not None]

    @property
    def served(self) -> list[tuple[str, int]]:
        return [(each.folder, each.version) for each in self.weights]

    def in_force(self) -> ServedWeights | None:
        """Waits for the end of a swap."""
        with weights_in_force(self.paths[0], "draft").held() as served:
            return served

    def sums(self) -> list[float]:
        """One for each engine, which tells the weights apart."""
        return [
            float(sum(each.double().abs().sum() for each in weights._model.parameters()))
            for weights in self.weights
        ]

    def use(self, function: Callable[[Replicas], Awaitable[Any]]) -> Any:
        """The function's result with a front that is connected to both."""

        async def run() -> Any:
            tokenizer = load_tokenizer("zoo:llama")
            replicas = await Replicas.connected(ARGS, tokenizer, self.paths, SECONDS)
            await asyncio.to_thread(wait_for, lambda: len(replicas._running()) == 2)
            try:
                return await function(replicas)
            finally:
                replicas.shutdown()

        return asyncio.run(run())

    def swap(self, folder: str) -> dict[str, Any]:
        async def ask(replicas: Replicas) -> Any:
            return await asyncio.to_thread(replicas.load_draft_weights, folder)

        found: dict[str, Any] = self.use(ask)
        return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for engine in fleet.engines:
        engine.close()
        engine.process._executor.check_integrity()


def test_all_engines_swap_while_requests_run_and_no_text_changes(fleet: Fleet) -> None:
    async def swap(replicas: Replicas) -> list[str]:
        async def texts() -> list[str]:
            handles = [replicas.submit(PROMPT, PARAMS) for _ in range(4)]
            return [(await handle).outputs[0].text for handle in handles]

        before = await texts()
        during = asyncio.create_task(texts())
        await asyncio.sleep(0)
        told = await asyncio.to_thread(replicas.load_draft_weights, fleet.other)
        reason = "no requests are recorded (record_traffic)"
        expected = {"version": 1, "folder": fleet.other, "replayed": 0, "reason": reason}
        assert told == expected
        return before + await during + await texts()

    assert len(set(fleet.use(swap))) == 1
    assert fleet.served == [(fleet.other, 1)] * 2
    args, version = with_served_draft(ARGS, fleet.paths)  # of an engine that is started again
    spec: Any = args.speculative_config
    assert (spec.speculative_model, version) == (fleet.other, 1)


def test_no_engine_swaps_when_one_of_them_refuses_the_weights(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str) -> None:
        raise ValueError(f"the weights do not fit: {folder}")

    before = fleet.sums()
    monkeypatch.setattr(fleet.weights[1], "stage", refuse)
    with pytest.raises(ValueError, match="do not fit"):
        fleet.swap(fleet.other)
    assert fleet.served == [(FIRST, 0)] * 2 and fleet.sums() == before
    assert [engine.process.parts["draft"]._staged for engine in fleet.engines] == [{}, {}]
    assert with_served_draft(ARGS, fleet.paths) == (ARGS, 0)
    monkeypatch.undo()
    assert fleet.swap(fleet.other)["version"] == 1


def test_engines_that_have_swapped_go_back_when_another_one_fails(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        wait_for(lambda: fleet.weights[0].version == 1)
        raise RuntimeError("the executor has died")

    before = fleet.sums()
    monkeypatch.setattr(fleet.weights[1], "swap", fail)
    with pytest.raises(RuntimeError, match="the executor has died"):
        fleet.swap(fleet.other)
    assert fleet.served == [(FIRST, 0)] * 2 and fleet.sums() == before
    assert with_served_draft(ARGS, fleet.paths) == (ARGS, 0)
    monkeypatch.undo()
    told = fleet.swap(fleet.other)
    assert told["version"] == 2, "the failed swap's version would have two folders"
    assert fleet.served == [(fleet.other, 2)] * 2


def test_a_front_that_connects_ends_what_a_killed_front_had_begun(fleet: Fleet) -> None:
    swap, before = fleet.engines[0].process.parts["draft"], fleet.sums()
    swap.stage(fleet.other, 1, keep_cache=False, force=True)
    with weights_in_force(fleet.paths[0], "draft").held():
        weights_in_force(fleet.paths[0], "draft").write(ServedWeights(FIRST, 0, None, 1))
    swap.keep(fleet.other, 1)  # and the front is killed

    async def connect(replicas: Replicas) -> None:
        await asyncio.to_thread(wait_for, lambda: fleet.served == [(FIRST, 0)] * 2)

    assert fleet.served == [(fleet.other, 1), (FIRST, 0)]
    fleet.use(connect)
    assert fleet.sums() == before


@pytest.mark.parametrize("number", [0, 1])
def test_weights_that_no_reader_foresaw_are_a_mistake_and_later_ones_are_swapped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(folder: str) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(fleet.weights[number], "_load", fail)
    with pytest.raises(ValueError, match="tuple index out of range"):
        fleet.swap(fleet.other)
    monkeypatch.undo()
    assert fleet.swap(fleet.other)["folder"] == fleet.other


def test_a_swap_that_an_engine_does_not_answer_ends_and_later_ones_are_swapped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, load = Event(), fleet.weights[1]._load

    def wait(folder: str) -> Any:
        goes_on.wait(SECONDS)
        return load(folder)

    async def swap(replicas: Replicas) -> None:
        monkeypatch.setattr(fleet.weights[1], "_load", wait)
        monkeypatch.setitem(WORK_SECONDS, "step", 0.1)
        for client in replicas._clients.values():
            client._timeout = 0.1
        with pytest.raises(RuntimeError, match="it has not answered"):
            await asyncio.to_thread(replicas.load_draft_weights, fleet.other)
        monkeypatch.undo()
        goes_on.set()
        for client in replicas._clients.values():
            client._timeout = SECONDS
        told = await asyncio.to_thread(replicas.load_draft_weights, fleet.other)
        assert told["folder"] == fleet.other

    fleet.use(swap)
    assert len(set(fleet.served)) == 1


def test_nothing_is_swapped_while_an_engine_does_not_run(fleet: Fleet) -> None:
    async def swap(replicas: Replicas) -> None:
        replicas._clients[1].shutdown()
        with pytest.raises(RuntimeError, match="an engine is being started"):
            await asyncio.to_thread(replicas.load_draft_weights, fleet.other)

    fleet.use(swap)
    assert fleet.served == [(FIRST, 0)] * 2


def test_all_engines_swap_back_when_one_of_them_has_fewer_tokens_a_round(fleet: Fleet) -> None:
    def end(version: int, tokens: int) -> None:
        weights = fleet.weights[1]
        for _ in range(2):
            weights.add_end(Ended(version, tokens))  # type: ignore[arg-type] # a stand-in
        fleet.engines[1].process._worker.call(weights.swap_back_if_worse)

    async def watch(replicas: Replicas) -> None:
        await asyncio.to_thread(replicas.load_draft_weights, fleet.other)
        other_front = await Replicas.connected(ARGS, replicas._tokenizer, fleet.paths, None)
        await asyncio.to_thread(wait_for, lambda: len(other_front._running()) == 2)
        await asyncio.to_thread(end, 1, 800)
        await asyncio.to_thread(wait_for, lambda: fleet.served == [(FIRST, 2)] * 2)
        served = await asyncio.to_thread(fleet.in_force)
        assert served is not None and (served.folder, served.before) == (FIRST, None)
        other_front.shutdown()

    before = fleet.sums()
    end(0, 1000)
    fleet.use(watch)
    assert fleet.served == [(FIRST, 2)] * 2 and fleet.sums() == before


@pytest.mark.slow
def test_an_engine_that_is_started_again_has_the_weights_of_the_others(tmp_path: Path) -> None:
    key, keys, heads = "a" * 20, tmp_path / "keys", tmp_path / "heads"
    keys.write_text(f"operator: {key}\n")
    heads.mkdir()
    other = str(copy_of(FIRST, heads / "other", 0.9))
    flags = "--draft_model_root", str(heads), "--draft_model_key", "operator"
    spec = {"decoding_type": "Draft_Target", "speculative_model": FIRST, "max_draft_len": 3}
    with (
        ServedProcess(
            tmp_path,
            *("--dp_size", "2", "--frontends", "2", "--api_key", f"@{keys}", *flags),
            load_format="auto",
            kv_cache_config=CACHE,
            speculative_config=spec,
        ) as server,
        httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS
        ) as client,
    ):

        def text() -> str:
            body = SHORT | {"max_tokens": 30, "ignore_eos": True, "temperature": 0}
            found: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return found

        def engines() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get("/server_info").json()["internal_states"]
            return found

        wait_for(lambda: len(engines()) == 2)
        before = text()
        with client.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = next(each for each in engines() if each["num_requests_running"])
            told = client.post("/v1/draft_model", json={"folder": "other"})
            assert told.json().items() >= {"version": 1, "folder": "other", "replayed": 0}.items()
            idle = next(each for each in engines() if each["engine"] != busy["engine"])
            os.kill(idle["ranks"][0]["process"], signal.SIGKILL)
            assert "data: [DONE]" in lines, "the stream of the other engine was lost"
        wait_for(lambda: len(engines()) == 2)
        wanted = {"version": 1, "folder": other}
        assert all(each["draft_weights"].items() >= wanted.items() for each in engines())
        assert [text() for _ in range(4)] == [before] * 4
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.text
