"""`tllm-serve --dp_size N`: where requests go, and what is left of a server when an engine dies."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.executor.one_group import cache_of
from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import LONG, MODEL, ServedProcess
from tests.server.test_processes import stream
from tllm_spec.cli.serve import main
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.resources.kv_events import KVEvents
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server import engine_process as engine_loop
from tllm_spec.server import wire as link
from tllm_spec.server.engine_process import EngineLoop, args_of_engine
from tllm_spec.server.prefix_router import BUSY_TOKENS, PrefixRouter
from tllm_spec.server.replicas import Replicas
from tllm_spec.server.wire import new_unpacker, pack
from tllm_spec.text.tokenizer import load_tokenizer

CACHE = {"max_tokens": 8192, "tokens_per_block": 16}


def states(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/server_info").json()["internal_states"]
    return found


def complete(url: str, prompt: list[int], max_tokens: int = 2) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def two_engines(folder: Path) -> Iterator[ServedProcess]:
    flags = ("--dp_size", "2", "--vllm_metrics")
    with ServedProcess(folder, *flags, kv_cache_config=CACHE) as served:
        wait_for(lambda: len(states(served.url)) == 2)
        yield served
        assert served.end(signal.SIGTERM) == 0
        assert "Traceback" not in served.text and "ERROR asyncio" not in served.text


@pytest.mark.slow
def test_requests_follow_their_prefix_and_a_dead_engine_takes_only_its_own_with_it(
    tmp_path: Path,
) -> None:
    prompts = [[number] * 64 for number in range(5, 11)]
    with two_engines(tmp_path) as served:
        url = served.url
        texts = [complete(url, prompt)["choices"][0]["text"] for prompt in prompts]
        with stream(url, LONG) as lines:  # keeps one engine busier than the other
            again = [complete(url, prompt) for prompt in prompts]
            assert [each["choices"][0]["text"] for each in again] == texts
            assert all(cached(each) == 48 for each in again)  # each went where its prefix was
            num_prompt_tokens = [state["totals"]["prompt_tokens"] for state in states(url)]
            assert all(num_prompt_tokens), "one engine got all requests"
            text = httpx.get(f"{url}/metrics").text
            for name in ("trtllm_num_requests_running", "vllm:num_requests_running"):
                rows = re.findall(rf'{name}\{{engine="(\d)".* (\d)\.0', text)
                assert sorted(engine for engine, _ in rows) == ["0", "1"]
                assert sorted(value for _, value in rows) == ["0", "1"]
            idle = next(each for each in states(url) if not each["num_requests_running"])
            os.kill(idle["ranks"][0]["process"], signal.SIGKILL)
            wait_for(lambda: len(states(url)) == 1)
            assert complete(url, prompts[0])["choices"][0]["text"] == texts[0]
            assert next(line for line in lines if line).startswith("data: ")


@pytest.mark.slow
def test_an_engine_that_dies_is_started_again_and_serves(tmp_path: Path) -> None:
    with two_engines(tmp_path) as served:
        url = served.url
        with stream(url, LONG) as lines:
            busy = next(each for each in states(url) if each["num_requests_running"])
            os.kill(busy["ranks"][0]["process"], signal.SIGKILL)
            assert "has ended" in [line for line in lines if line][-1]
        assert httpx.get(f"{url}/health").status_code == 200
        wait_for(lambda: len(states(url)) == 2)
        other = next(each for each in states(url) if each["engine"] != busy["engine"])
        os.kill(other["ranks"][0]["process"], signal.SIGKILL)
        wait_for(lambda: [each["engine"] for each in states(url)] == [busy["engine"]])
        assert complete(url, [5] * 9)
        wait_for(lambda: len(states(url)) == 2)
        wait_for(lambda: f"engine {other['engine']} serves again" in served.text)
        for number in (0, 1):
            assert f"engine {number} ended with SIGKILL and is started again" in served.text
            assert f"INFO engine {number} tllm_spec." in served.text


class Compiling:
    """A front's client of an engine that may end while it compiles a grammar."""

    is_running = is_healthy = True

    def __init__(self, ends: bool) -> None:
        self._ends, self.num_compiled = ends, 0

    def compile_grammar(self, params: SamplingParams) -> None:
        if self._ends:
            self.is_running = False
            raise RuntimeError("the engine has ended")
        self.num_compiled += 1


def test_a_grammar_is_compiled_by_another_engine_when_one_ends_meanwhile() -> None:
    replicas = Replicas(LlmArgs.from_kwargs(MODEL), load_tokenizer(MODEL), ["a", "b"], None)
    clients = [Compiling(ends=True), Compiling(ends=False)]
    replicas._clients = dict(enumerate(clients))  # type: ignore[arg-type] # a stand-in
    replicas.compile_grammar(SamplingParams())
    assert not clients[0].is_running and clients[1].num_compiled == 1
    clients[1]._ends = True
    with pytest.raises(RuntimeError, match="no engine runs"):
        replicas.compile_grammar(SamplingParams())


def test_several_engines_of_several_devices_are_refused_with_what_to_do() -> None:
    command = [MODEL, "--dp_size", "2", "--tp_size", "2"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1 and "start a server for each group of devices" in result.output


def test_each_engine_has_a_gpu_and_an_endpoint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "ipc:///again"}
    args = LlmArgs.from_kwargs(MODEL, kv_cache_config={"kv_events_config": events})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    second = args_of_engine(args, 1, 2)
    found = second.kv_cache_config.kv_events_config
    assert found is not None and second.device == "cuda:1" and found.data_parallel_rank == 1
    assert (found.endpoint, found.replay_endpoint) == ("tcp://127.0.0.1:5558", "ipc:///again_1")
    assert args_of_engine(args, 0, 1) is args
    with pytest.raises(ValueError, match="dp_size = 3 needs as many GPUs, and torch sees 2"):
        args_of_engine(args, 0, 3)
    one = args.model_copy(update={"device": "cuda:0"})
    with pytest.raises(ValueError, match="'cuda' is accepted"):
        args_of_engine(one, 0, 2)


# Which of several engines gets a request.


PAGE = 4
PROMPT = list(range(22))  # five pages and two tokens


class CachedEngine:
    """An engine's cache, whose events a router reads."""

    def __init__(self, router: PrefixRouter, number: int) -> None:
        self.cache: PagedCache = cache_of(64, PAGE, lambda *pages: None)
        self.events = KVEvents(self.cache.log_events())
        self.events.add_sink(lambda payload: router.read(number, payload))

    def run(self, tokens: list[int], salt: str | None = None) -> None:
        self.cache.add_sequence(1, tokens, salt)
        assert self.cache.extend(1, len(tokens))
        self.cache.free(1, tokens)
        self.events.send()


@pytest.fixture
def router() -> PrefixRouter:
    return PrefixRouter(3, PAGE)


@pytest.fixture
def engines(router: PrefixRouter) -> list[CachedEngine]:
    return [CachedEngine(router, number) for number in range(3)]


def chosen(router: PrefixRouter, unfinished: list[int], salt: str | None = None) -> int:
    return router.choose(router.hashes(PROMPT, salt), dict(enumerate(unfinished)))


def test_the_longest_cached_prefix_decides_and_then_the_fewest_tokens(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    assert chosen(router, [5, 3, 4]) == 1
    engines[2].run(PROMPT[:9])
    assert chosen(router, [5, 3, 4]) == 2
    engines[0].run(PROMPT[:13])
    assert chosen(router, [5, 3, 4]) == 0
    engines[1].run(PROMPT[:12] + [99] * 8)
    assert chosen(router, [5, 3, 4]) == 1  # as long a prefix as that of engine 0, and fewer tokens
    assert router.num_cached(1, router.hashes(PROMPT, None)) == 3


def test_a_prefix_counts_only_for_requests_with_its_salt(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[2].run(PROMPT, "a")
    assert chosen(router, [1, 0, 1]) == 1
    assert chosen(router, [1, 0, 1], "a") == 2
    assert chosen(router, [1, 0, 1], "b") == 1


def test_the_router_knows_as_many_pages_as_the_cache_would_reuse(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    for end in (4, 20, 22):
        engines[0].run(PROMPT[:end])
        expected = engines[0].cache.match(PROMPT) // PAGE
        assert router.num_cached(0, router.hashes(PROMPT, None)) == expected
    engines[0].cache.reset()
    engines[0].events.send()
    assert router.num_cached(0, router.hashes(PROMPT, None)) == 0


def test_a_busy_engine_is_passed_over_whatever_it_has_cached(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[2].run(PROMPT)
    assert chosen(router, [0, 0, BUSY_TOKENS]) == 2
    assert chosen(router, [9, 8, 3 * BUSY_TOKENS]) == 1
    assert chosen(router, [100 * BUSY_TOKENS, 99 * BUSY_TOKENS, 101 * BUSY_TOKENS]) == 2


def test_an_engine_that_has_ended_has_nothing_cached(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[1].run(PROMPT)
    assert chosen(router, [0, 9, 9]) == 1
    router.forget(1)
    assert chosen(router, [0, 9, 9]) == 0
    engines[1].events.add_sink(lambda payload: router.read(1, payload))  # it is connected again
    assert chosen(router, [0, 9, 9]) == 1


# The engine's end of a connection to a front.


def test_a_front_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BACKLOG_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    woken: list[bool] = []
    slow = link.Link(ours, lambda: woken.append(True))
    while slow.is_open:
        slow.send(b"x" * (1 << 16))
    assert woken and not slow.has_backlog
    assert slow.read() is None
    slow.close()
    theirs.close()


def test_what_a_socket_does_not_take_at_once_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = link.Link(ours, lambda: None), link.Link(theirs, lambda: None)
    for number in range(200):
        sender.send([number, b"x" * 10_000])
    assert sender.has_backlog
    numbers: list[int] = []
    while len(numbers) < 200:
        sender.flush()
        numbers += [number for number, _ in receiver.read() or ()]
    assert numbers == list(range(200)) and not sender.has_backlog
    sender.close()
    assert receiver.read() is None
    receiver.close()


def test_what_is_left_at_the_end_is_sent_in_however_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Port:
        num_unfinished = num_submitted = 0

        def add(self, front: link.Link) -> None:
            front.send(message)
            loop.stop()

    send, message = link.Link._send, b"x" * 10_000
    monkeypatch.setattr(link.Link, "_send", lambda self, data: send(self, data[:100]))
    monkeypatch.setattr(engine_loop, "LAST_SECONDS", 300.0)
    path, port = str(tmp_path / "engine"), Port()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as front:
        listener.bind(path)
        listener.listen()
        front.settimeout(60)
        front.connect(path)
        unused: Any = None
        loop = EngineLoop(port, listener, unused)  # type: ignore[arg-type]  # it has what is used
        running = threading.Thread(target=loop.run)
        running.start()
        unpacker = new_unpacker()
        unpacker.feed(front.makefile("rb").read(len(pack(message))))
        running.join()
    assert list(unpacker) == [message]
