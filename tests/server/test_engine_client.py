"""A front's client and the engine's port, with a socket between them: the same answers as `LLM`
in one process."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.server.engine_thread import ARGS, OPTIONS, PROMPT, STREAMED, WITHOUT_GRAMMARS, Engine
from tests.server.http_answers import SECONDS, wait_for
from tllm_spec import LLM, GuidedDecodingParams, SamplingParams
from tllm_spec.outputs import RequestOutput
from tllm_spec.sampling_params import RequestOptions, ThinkingBudgetLogitsProcessor
from tllm_spec.server.admission import engine_running
from tllm_spec.server.engine_client import EngineClient, EngineConnection
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.server.wire import pack
from tllm_spec.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.close()
    engine.process._executor.check_integrity()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("zoo:llama", **OPTIONS) as llm:
        yield llm


def texts_of(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (each.text, each.token_ids, each.finish_reason, each.stop_reason, each.logprobs)
        for each in output.outputs
    ]


STOPPING = {"temperature": 0.0, "max_tokens": 60}


@pytest.mark.thinned(12)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 20},
        {"max_tokens": 20, "temperature": 0.8, "seed": 5, "n": 3, "top_k": 20, "min_p": 0.01},
        {"max_tokens": 9, "logprobs": 2, "prompt_logprobs": 1},
        {"max_tokens": 20, "bad": ["self", "return"], "logit_bias": {7: 2.5, 9: -3.0}},
        {"max_tokens": 20, "ignore_eos": True, "min_tokens": 5, "repetition_penalty": 1.2},
        {"max_tokens": 20, "speculation": {"enabled": False}},
        {"max_tokens": 20, "stop_token_ids": list(range(40, 60))},
        {**STOPPING, "stop": ["\n", "zzz"]},
        {**STOPPING, "stop": ["\n"], "min_tokens": 30},
        {**STOPPING, "stop": ["e", "r"], "logprobs": 1, "n": 2, "temperature": 0.9, "seed": 1},
        {**STOPPING, "stop": ["):"], "include_stop_str_in_output": True},
        {"max_tokens": 1, "stop": ["e"]},
        {"temperature": 0.0, "max_tokens": 1, "stop": ["rg"]},  # in the first token
    ],
)
def test_the_answer_is_that_of_one_process(
    engine: Engine, llm: LLM, params: dict[str, Any], streaming: bool
) -> None:
    expected = llm.generate(PROMPT, SamplingParams(**params))

    async def ask(client: EngineClient) -> RequestOutput:
        return await client.submit(
            PROMPT, SamplingParams(**params), RequestOptions(streaming=streaming)
        )

    found = engine.use(ask)
    assert texts_of(found) == texts_of(expected)
    for metrics in (found.metrics, expected.metrics):
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
        assert times == sorted(times) and times[-1] < metrics.finished_time
    assert found.outputs[0].prompt_logprobs == expected.outputs[0].prompt_logprobs
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.speculative_decoding.rounds >= expected.speculative_decoding.rounds > 0 or (
        params["max_tokens"] == 1
    )


def test_pieces_of_a_stream_never_show_a_part_of_a_stop_string(engine: Engine, llm: LLM) -> None:
    full = llm.generate(PROMPT, SamplingParams(**STOPPING)).outputs[0].text
    stop = full[len(full) // 2 :][:6]

    async def ask(client: EngineClient) -> list[str]:
        params = SamplingParams(**STOPPING, stop=stop)
        return [output.outputs[0].text async for output in client.submit(PROMPT, params, STREAMED)]

    texts = engine.use(ask)
    assert texts[-1] == full[: full.index(stop)]
    assert all(texts[-1].startswith(text) for text in texts)


def test_a_request_that_stops_at_a_string_counts_as_stopped(engine: Engine) -> None:
    async def ask(client: EngineClient) -> tuple[dict[str, int], dict[str, int]]:
        before = await ended(client)
        handle = client.submit(PROMPT, SamplingParams(max_tokens=60, stop=["e", " "]))
        await handle
        return before, await ended(client)

    before, after = engine.use(ask)
    assert after["stop"] == before.get("stop", 0) + 1
    assert after.get("cancelled") == before.get("cancelled")


def test_a_client_is_unhealthy_while_the_engine_does_not_answer(engine: Engine) -> None:
    go_on = threading.Event()

    async def ask(client: EngineClient) -> None:
        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                await asyncio.sleep(0.01)

        engine.process._worker.submit(lambda: go_on.wait(SECONDS))
        assert client.is_healthy
        await until(lambda: not client.is_healthy)
        with pytest.raises(RuntimeError, match=r"it has not answered for 1\.5 s"):
            await asyncio.to_thread(client.server_info)
        go_on.set()
        await until(lambda: client.is_healthy)
        assert (await client.submit(PROMPT, SamplingParams(max_tokens=3))).finished

    engine.use(ask, timeout=1.5)


def test_grammars_that_cannot_be_compiled_do_not_mean_that_the_engine_is_down(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the process that compiles grammars did not start")

    monkeypatch.setattr(engine.process._grammars, "states_of", fail)

    async def ask(client: EngineClient) -> None:
        params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="[0-9]"))
        reason = "guided decoding is not available: "
        with pytest.raises(RequestRefused, match=reason) as refusal, engine_running():
            await asyncio.to_thread(client.compile_grammar, params)
        assert refusal.value.status == 503 and client.is_healthy

    engine.use(ask)


async def ended(client: EngineClient) -> dict[str, int]:
    info = await asyncio.to_thread(client.server_info)
    found: dict[str, int] = info["internal_states"][0]["totals"]["requests_by_finish_reason"]
    return found


def test_an_aborted_request_keeps_what_it_has(engine: Engine) -> None:
    async def ask(client: EngineClient) -> RequestOutput:
        params = SamplingParams(max_tokens=1900, ignore_eos=True)
        handle = client.submit(PROMPT, params, STREAMED)
        await anext(handle)
        handle.abort()
        return await handle

    found = engine.use(ask)
    assert found.outputs[0].finish_reason == "cancelled" and found.outputs[0].length > 0


def test_requests_of_a_front_that_goes_are_cancelled(engine: Engine) -> None:
    async def leave(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=1900, ignore_eos=True, n=3)
        handle = client.submit(PROMPT, params, STREAMED)
        await anext(handle)
        assert client.num_unfinished == 3

    engine.use(leave)
    wait_for(lambda: engine.process._port.num_unfinished == 0)
    wait_for(lambda: not engine.process._executor.scheduler.running)


def test_what_cannot_be_sent_is_refused_and_counts_nowhere(engine: Engine) -> None:
    async def ask(client: EngineClient) -> None:
        with pytest.raises(ValueError, match="surrogates not allowed"):
            client.submit(PROMPT, SamplingParams(n=3), RequestOptions(client=("a", "\ud800")))
        with pytest.raises(ValueError, match="surrogates not allowed"):
            await asyncio.to_thread(client.load_draft_weights, "\ud800")
        await asyncio.sleep(0)  # what was scheduled has run
        assert (client.num_unfinished, client.num_unfinished_tokens) == (0, 0)
        assert not client._asked
        await client.submit(PROMPT, SamplingParams(max_tokens=1))

    engine.use(ask)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("a " * 10_000, {}),
        ([5] * 3000, {}),
        ([10**9], {}),
        (PROMPT, {"stop_token_ids": [10**9]}),
        ([5] * 2000, {"max_tokens": 40, "n": 1, "stop": "\ud800"}),
    ],
)
def test_mistakes_are_refused_in_front_with_the_words_of_one_process(
    engine: Engine, llm: LLM, prompt: Any, params: dict[str, Any]
) -> None:
    async def ask(client: EngineClient) -> str:
        with pytest.raises(ValueError) as refusal:
            client.submit(prompt, SamplingParams(**params))
        return str(refusal.value)

    with pytest.raises(ValueError) as expected:
        llm.generate(prompt, SamplingParams(**params))
    assert engine.use(ask) == str(expected.value)


def test_figures_of_the_engine_come_through_the_same_socket(engine: Engine) -> None:
    async def ask(client: EngineClient) -> tuple[Any, Any]:
        await client.submit(PROMPT, SamplingParams(max_tokens=3))
        info = await asyncio.to_thread(client.server_info)
        return info, await asyncio.to_thread(client.get_stats)

    info, stats = engine.use(ask)
    assert (info["max_batch_size"], info["model"]) == (4, "zoo:llama")
    assert info["internal_states"][0]["kv_cache"]["num_pages"] > 0
    assert stats and stats[-1]["iter"] >= 0


def test_a_round_sends_one_message_to_each_front(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(client: EngineClient) -> tuple[list[int], int]:
        sizes: list[int] = []
        receive = client._respond

        def watch(responses: Any) -> None:
            sizes.append(len(responses))
            receive(responses)

        monkeypatch.setattr(client, "_respond", watch)
        params = SamplingParams(max_tokens=40, n=4, ignore_eos=True, temperature=1.0, seed=1)
        output = await client.submit(PROMPT, params, STREAMED)
        rounds = max(each.speculative_decoding.rounds for each in output.outputs)
        return sizes, rounds

    sizes, rounds = engine.use(ask)
    assert max(sizes) == 4, "all requests of a round are in one message"
    assert len(sizes) <= rounds + 4, "and there is no more than one a round"


def test_a_guided_request_matches_its_grammar(engine: Engine, llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=20, guided_decoding={"choice": ["yes", "no"]})

    async def ask(client: EngineClient) -> RequestOutput:
        return await client.submit(PROMPT, params)

    found = engine.use(ask)
    assert texts_of(found) == texts_of(llm.generate(PROMPT, params))
    assert found.outputs[0].text in ("yes", "no")


def test_a_budget_travels_and_its_forced_end_completes_no_stop_string(
    engine: Engine, llm: LLM
) -> None:
    """The prompt has opened a section, whose closer is written `EF`."""
    assert llm.tokenizer is not None
    opener = llm.tokenizer.encode(PROMPT)[-1:]
    processor = ThinkingBudgetLogitsProcessor(2, opener, [40, 41])
    params = SamplingParams(max_tokens=20, logits_processor=processor, stop=["E", "F"], n=2)

    async def ask(client: EngineClient) -> RequestOutput:
        return await client.submit(PROMPT, params)

    found = engine.use(ask)
    assert texts_of(found) == texts_of(llm.generate(PROMPT, params))
    assert all(each.token_ids[2:4] == [40, 41] for each in found.outputs)
    refused = SamplingParams(thinking_token_budget=2)
    with pytest.raises(ValueError, match="thinking_token_budget = 2 needs reasoning_parser"):
        engine.use(lambda client: client.submit(PROMPT, refused))


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_the_engine_says_before_there_is_a_client_reaches_it(
    engine: Engine, is_lost: bool
) -> None:
    """As when a front starts while others are served."""

    async def run() -> tuple[int, int, bool]:
        ours, theirs = socket.socketpair()
        _, connection = await asyncio.get_running_loop().create_connection(
            EngineConnection, sock=ours
        )
        limits = engine.process._port._limits
        theirs.sendall(pack(["hello", asdict(limits)]) + pack(["load", 7, 90]))
        await connection.limits
        if is_lost:
            theirs.close()
            await connection.closed
        client = EngineClient(ARGS, load_tokenizer("zoo:llama"), connection, limits)
        known = client.num_unfinished, client.num_unfinished_tokens, client.is_healthy
        client.shutdown()
        theirs.close()
        return known

    assert asyncio.run(run()) == (7, 90, not is_lost)


def test_an_answer_after_the_end_of_the_engine_is_ignored(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    limits = engine.process._port._limits

    async def run() -> int:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(EngineConnection, sock=ours)
        client = EngineClient(ARGS, load_tokenizer("zoo:llama"), connection, limits)
        asked = asyncio.create_task(asyncio.to_thread(client.server_info))
        await loop.run_in_executor(None, theirs.recv, 1000)
        messages = ["down", "no memory"], ["answer", 1, None, "no memory", False], ["load", 7, 90]
        theirs.sendall(b"".join(map(pack, messages)))
        with pytest.raises(RuntimeError, match="no memory"):
            await asked
        theirs.shutdown(socket.SHUT_WR)
        await connection.closed  # all has come
        client.shutdown()
        theirs.close()
        return client.num_unfinished

    assert asyncio.run(run()) == 7
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_when_the_engine_dies_requests_fail_and_new_ones_are_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path, args=WITHOUT_GRAMMARS)

    async def ask(client: EngineClient) -> str:
        params = SamplingParams(max_tokens=1900, ignore_eos=True)
        handle = client.submit(PROMPT, params, STREAMED)
        await anext(handle)

        def die() -> bool:
            raise MemoryError("no memory")

        engine.process._worker._round = die  # type: ignore[method-assign]  # a fault of the loop
        await handle
        assert not client.is_healthy
        with pytest.raises(RuntimeError, match="no memory"):
            client.submit(PROMPT, params)
        with pytest.raises(RuntimeError, match="no memory"):
            client.server_info()
        return str(handle.error)

    assert "no memory" in engine.use(ask)
    engine.close()


@pytest.mark.thinned
@pytest.mark.parametrize("nonsense", [["submit", "x"], ["run", "rm"], {"a": 1}, 5, ["cancel", [1]]])
def test_a_front_that_sends_nonsense_is_cut_off_and_others_go_on(
    engine: Engine, nonsense: Any
) -> None:
    async def talk(client: EngineClient) -> None:
        handle = client.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        loop = asyncio.get_running_loop()
        _, hostile = await loop.create_unix_connection(EngineConnection, engine.path)
        await hostile.limits
        hostile.send(pack(nonsense))
        await asyncio.wait_for(hostile.closed, 60)
        assert (await handle).outputs[0].length == 100

    engine.use(talk)


def test_bytes_that_are_no_message_cut_a_front_off(engine: Engine) -> None:
    async def talk(client: EngineClient) -> None:
        loop = asyncio.get_running_loop()
        _, hostile = await loop.create_unix_connection(EngineConnection, engine.path)
        await hostile.limits
        hostile._transport.write(b"\xc1" * 100)
        await asyncio.wait_for(hostile.closed, 60)
        output = await client.submit(PROMPT, SamplingParams(max_tokens=3))
        assert output.outputs[0].length == 3

    engine.use(talk)


def test_what_is_sent_is_plain_msgpack(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = EngineConnection.send

    def watch(connection: EngineConnection, message: bytes) -> None:
        sent.append(message)
        send(connection, message)

    async def ask(client: EngineClient) -> None:
        await client.submit(PROMPT, SamplingParams(max_tokens=3, stop_token_ids=[9]))

    monkeypatch.setattr(EngineConnection, "send", watch)
    engine.use(ask)
    assert msgpack.unpackb(sent[0], strict_map_key=False)[0] == "submit"


# Grammars of requests in the engine's process.


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
