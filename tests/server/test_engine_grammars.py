"""Grammars of requests in the engine's process."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.engine_thread import PROMPT, Engine
from tllm_spec import SamplingParams
from tllm_spec.server.engine_client import EngineClient


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
    engine.process._executor.check_integrity()


def test_a_known_grammar_does_not_wait_for_others_that_are_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    known = SamplingParams(max_tokens=5, guided_decoding={"choice": ["known", "same"]})
    grammars, may_go_on = engine.process._port._grammars, threading.Event()
    states_of, slow = grammars.states_of, list[str]()

    def slowly(source: Any, number: int) -> Any:
        if "slow" in source.text:
            slow.append(source.text)
            assert may_go_on.wait(60)
        return states_of(source, number)

    async def ask(client: EngineClient) -> list[str]:
        await client.submit(PROMPT, known)
        monkeypatch.setattr(grammars, "states_of", slowly)
        others = [
            client.submit(PROMPT, SamplingParams(guided_decoding={"choice": [f"slow{number}"]}))
            for number in range(12)  # more than there are threads
        ]
        try:
            text = (await asyncio.wait_for(client.submit(PROMPT, known), 60)).outputs[0].text
        finally:
            may_go_on.set()
        return [text, *[(await each).outputs[0].text for each in others]]

    text, *others = engine.use(ask)
    assert text in ("known", "same") and others == [f"slow{number}" for number in range(12)]


@pytest.mark.parametrize("error", [ValueError("no room"), RuntimeError("no process")])
def test_a_request_whose_grammar_is_lost_fails_and_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pytest.importorskip("llguidance")
    port = engine.process._port

    def fail(source: Any, number: int) -> Any:
        raise error

    async def ask(client: EngineClient) -> str | None:
        monkeypatch.setattr(port._grammars, "states_of", fail)
        params = SamplingParams(guided_decoding={"choice": [f"lost by {error}"]})
        handle = client.submit(PROMPT, params)
        await asyncio.wait_for(handle, 60)
        return handle.error

    assert engine.use(ask) == str(error)
    assert not port._unmade and not port._entries


def test_a_request_that_is_cancelled_while_it_is_queued_does_not_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    port = engine.process._port
    queue, put = port._queue, port._queue.put
    queued, cancelled = list[int](), list[int]()

    def put_late(requests: Any) -> bool:
        queued.extend(each.request_id for each in requests)
        thread = threading.Thread(target=port._cancel, args=(queued[0], "cancelled"))
        thread.start()
        thread.join(0.2)  # it waits until the request is queued, or has ended in this time
        return put(requests)

    def cancel(request_id: int, reason: str) -> None:
        cancelled.append(request_id)
        type(queue).cancel(queue, request_id, reason)

    async def ask(client: EngineClient) -> str | None:
        monkeypatch.setattr(queue, "put", put_late)
        monkeypatch.setattr(queue, "cancel", cancel)
        params = SamplingParams(max_tokens=500, guided_decoding={"regex": "(a|b){500}"})
        handle = await asyncio.wait_for(client.submit(PROMPT, params), 60)
        return handle.outputs[0].finish_reason

    assert engine.use(ask) == "cancelled"
    assert cancelled == queued and not port._unmade
