"""Draft weights of several engines: all of them swap, or none, also back."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.executor.test_draft_weights import Ended, copy_of
from tests.server.engine_fleet import DRAFT, PARAMS, Fleet
from tests.server.engine_thread import ARGS, PROMPT
from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import LONG, SHORT, ServedProcess
from tests.server.test_replicas import CACHE
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.server.engine_client import WORK_SECONDS
from tllm_spec.server.engine_process import with_served_draft
from tllm_spec.server.fleet import FleetDraft, ServedWeights
from tllm_spec.server.replicas import Replicas


class DraftFleet(Fleet):
    @property
    def weights(self) -> list[DraftWeights]:
        return [each.draft_weights for each in self.parts]

    @property
    def served(self) -> list[tuple[str, int]]:
        return [(each.folder, each.version) for each in self.weights]

    def in_force(self) -> ServedWeights | None:
        """Waits for the end of a swap."""
        with FleetDraft(self.paths).held() as served:
            return served

    def swap(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(lambda front: front.load_draft_weights(self.draft))
        return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[DraftFleet]:
    fleet = DraftFleet(tmp_path)
    yield fleet
    fleet.close()


def test_all_engines_swap_while_requests_run_and_no_text_changes(fleet: DraftFleet) -> None:
    async def swap(replicas: Replicas) -> list[str]:
        async def texts() -> list[str]:
            handles = [replicas.submit(PROMPT, PARAMS) for _ in range(4)]
            return [(await handle).outputs[0].text for handle in handles]

        before = await texts()
        during = asyncio.create_task(texts())
        await asyncio.sleep(0)
        told = await asyncio.to_thread(replicas.load_draft_weights, fleet.draft)
        reason = "no requests are recorded (record_traffic)"
        expected = {"version": 1, "folder": fleet.draft, "replayed": 0, "reason": reason}
        assert told == expected
        return before + await during + await texts()

    assert len(set(fleet.use(swap))) == 1
    assert fleet.served == [(fleet.draft, 1)] * 2
    args, version = with_served_draft(ARGS, fleet.paths)  # of an engine that is started again
    spec: Any = args.speculative_config
    assert (spec.speculative_model, version) == (fleet.draft, 1)


@pytest.mark.parametrize("number", [0, 1])
def test_weights_that_no_reader_foresaw_are_a_mistake_and_later_ones_are_swapped(
    fleet: DraftFleet, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(folder: str) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(fleet.weights[number], "_load", fail)
    with pytest.raises(ValueError, match="tuple index out of range"):
        fleet.swap()
    monkeypatch.undo()
    assert fleet.swap()["folder"] == fleet.draft


def test_a_swap_that_an_engine_does_not_answer_ends_and_later_ones_are_swapped(
    fleet: DraftFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, load = Event(), fleet.weights[1]._load

    def wait(folder: str) -> Any:
        goes_on.wait(SECONDS)
        return load(folder)

    async def swap(replicas: Replicas) -> None:
        monkeypatch.setattr(fleet.weights[1], "_load", wait)
        monkeypatch.setitem(WORK_SECONDS, "step", 0.1)
        with pytest.raises(RuntimeError, match="it has not answered"):
            await asyncio.to_thread(replicas.load_draft_weights, fleet.draft)
        monkeypatch.undo()
        goes_on.set()
        told = await asyncio.to_thread(replicas.load_draft_weights, fleet.draft)
        assert told["folder"] == fleet.draft

    fleet.use(swap)
    assert len(set(fleet.served)) == 1


def test_nothing_is_swapped_while_an_engine_does_not_run(fleet: DraftFleet) -> None:
    async def swap(replicas: Replicas) -> None:
        replicas._clients[1].shutdown()
        with pytest.raises(RuntimeError, match="an engine is being started"):
            await asyncio.to_thread(replicas.load_draft_weights, fleet.draft)

    fleet.use(swap)
    assert fleet.served == [(DRAFT, 0)] * 2


def test_all_engines_swap_back_when_one_of_them_has_fewer_tokens_a_round(fleet: DraftFleet) -> None:
    def end(version: int, tokens: int) -> None:
        weights = fleet.weights[1]
        for _ in range(2):
            weights.add_end(Ended(version, tokens))  # type: ignore[arg-type] # a stand-in
        fleet.engines[1].process._worker.call(weights.swap_back_if_worse)

    async def watch(replicas: Replicas) -> None:
        await asyncio.to_thread(replicas.load_draft_weights, fleet.draft)
        other_front = await Replicas.connected(ARGS, replicas._tokenizer, fleet.paths, None)
        await asyncio.to_thread(wait_for, lambda: len(other_front._running()) == 2)
        await asyncio.to_thread(end, 1, 800)
        await asyncio.to_thread(wait_for, lambda: fleet.served == [(DRAFT, 2)] * 2)
        served = await asyncio.to_thread(fleet.in_force)
        assert served is not None and (served.folder, served.before) == (DRAFT, None)
        other_front.shutdown()

    end(0, 1000)
    fleet.use(watch)
    assert fleet.served == [(DRAFT, 2)] * 2


@pytest.mark.slow
def test_an_engine_that_is_started_again_has_the_weights_of_the_others(tmp_path: Path) -> None:
    key, keys, heads = "a" * 20, tmp_path / "keys", tmp_path / "heads"
    keys.write_text(f"operator: {key}\n")
    heads.mkdir()
    other = str(copy_of(DRAFT, heads / "other", 0.9))
    flags = "--draft_model_root", str(heads), "--draft_model_key", "operator"
    spec = {"decoding_type": "Draft_Target", "speculative_model": DRAFT, "max_draft_len": 3}
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
