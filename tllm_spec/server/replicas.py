"""Several engines with the whole model each, as one: every request goes to the engine that the
router chooses. An engine that ends takes its own requests with it, and is used again once it has
been started again. All of them replace their weights, or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.intake import Intake, Prompt
from tllm_spec.lora_request import salt_of
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.server.engine_client import SHUT_DOWN, Answer, EngineClient, EngineConnection, in_all
from tllm_spec.server.fleet import FleetAdapters, FleetDraft, FleetSleep, FleetTarget
from tllm_spec.server.prefix_router import PrefixRouter
from tllm_spec.shared_tensors import SharedTensors
from tllm_spec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm_spec.llm import LLM

RETRY_SECONDS = 0.2
NONE_RUNS = "no engine runs; they are being started again"


class Replicas:
    """Several engines behind `EngineClient`'s interface. paths: the engines' Unix sockets. timeout:
    as of `EngineClient`. Use `connected`."""

    def __init__(
        self, args: LlmArgs, tokenizer: Tokenizer, paths: Sequence[str], timeout: float | None
    ) -> None:
        self.args = args
        self.tokenizer: Tokenizer | None = tokenizer
        self._tokenizer = tokenizer
        self._paths = paths
        self._timeout = timeout
        self._router = PrefixRouter(len(paths), args.kv_cache_config.tokens_per_block)
        self._clients: dict[int, EngineClient] = {}  # which get requests
        self._connected: dict[int, EngineClient] = {}  # and those that are about to get some
        draft = str(getattr(args.speculative_config, "speculative_model", ""))
        self._draft = FleetDraft(paths, draft, self._changing)
        self._target = FleetTarget(paths, args.model, self._changing)
        self._sleep = FleetSleep(paths[0], self._changing)
        self.adapters = FleetAdapters(paths[0], self._changing)
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_shut_down = False

    @classmethod
    async def connected(
        cls, args: LlmArgs, tokenizer: Tokenizer, paths: Sequence[str], timeout: float | None
    ) -> Replicas:
        """The replicas, once one engine serves."""
        replicas = cls(args, tokenizer, paths, timeout)
        replicas._tasks = [
            asyncio.create_task(replicas._keep_connected(number)) for number in range(len(paths))
        ]
        await replicas._first.wait()
        return replicas

    @property
    def pause_mode(self) -> str | None:
        """The engines', which pause together."""
        return next((each.pause_mode for each in self.running_engines() if each.pause_mode), None)

    @property
    def is_healthy(self) -> bool:
        return any(client.is_healthy for client in self._running().values())

    @property
    def num_unfinished(self) -> int:
        return sum(client.num_unfinished for client in self._running().values())

    def check_length(self, text: str | Sequence[int]) -> None:
        """As `LLM.check_length`."""
        self._intake.check_length(text)

    def compile_grammar(self, params: SamplingParams) -> None:
        """As `LLM.compile_grammar`, by one engine. The others compile the grammar when a request
        has it."""
        for client in self._routable().values():
            try:
                client.compile_grammar(params)
                return
            except RuntimeError:
                if client.is_running:
                    raise
        raise RuntimeError(NONE_RUNS)

    def submit(
        self, inputs: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> RequestHandle:
        """As `LLM.submit`."""
        made = self._intake.submission(inputs, params, options)
        engines = self._routable()
        served = {} if options.adapter is None else self.adapters.served()
        adapter = served.get(options.adapter or "")
        salt = salt_of(options.cache_salt, adapter.version if adapter else None)
        hashes = self._router.hashes(made.token_ids, salt)
        unfinished = {number: each.num_unfinished_tokens for number, each in engines.items()}
        return engines[self._router.choose(hashes, unfinished)].start(made)

    def server_info(self) -> dict[str, Any]:
        """As `LLM.server_info`, with a state for each engine that runs. Waits for the engines."""
        infos = self._ask_all(EngineClient.server_info)
        states = [
            {"engine": number, **info["internal_states"][0]} for number, info in infos.items()
        ]
        return {**next(iter(infos.values())), "internal_states": states}

    def load_draft_weights(
        self, folder: str, *, keep_cache: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """As `LLM.load_draft_weights`: in all engines, or in none."""
        return self._draft.swap(folder, keep_cache=keep_cache, force=force)

    def update_weights(
        self, source: str | SharedTensors, version: str | None, part: str, running: str
    ) -> dict[str, Any]:
        """As `LLM.update_weights`, of a folder: in all engines, or in none. A restarted engine
        reads it again, so tensors of another process raise ValueError."""
        if isinstance(source, SharedTensors):
            raise ValueError("several engines (--dp_size) take weights of a folder only")
        with self._sleep.updating():
            return self._target.update(source, version, part, running)

    def pause(self, mode: str) -> None:
        """As `LLM.pause`, of all engines."""
        self._sleep.pause(mode)

    def resume(self) -> None:
        """As `LLM.resume`."""
        self._sleep.resume()

    def sleep(self, level: int) -> list[dict[str, Any]]:
        """As `LLM.sleep`, of all engines."""
        return self._sleep.sleep(level)

    def wake_up(self, tags: Sequence[str] | None) -> list[dict[str, Any]]:
        """As `LLM.wake_up`."""
        return self._sleep.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether something of an engine is asleep. Waits for the engines."""
        return any(in_all(self.running_engines(), lambda engine: engine.is_sleeping))

    def get_stats(self) -> list[dict[str, Any]]:
        """As `LLM.get_stats`, for one engine after the other."""
        return [each for stats in self._ask_all(EngineClient.get_stats).values() for each in stats]

    def shutdown(self) -> None:
        """As `EngineClient.shutdown`."""
        self._is_shut_down = True
        for task in self._tasks:
            task.cancel()
        for client in self._connected.values():
            client.shutdown()

    def running_engines(self) -> list[EngineClient]:
        """Those that get requests."""
        return list(self._running().values())

    def _running(self) -> dict[int, EngineClient]:
        """By number, in order."""
        return _that_run(self._clients)

    def _changing(self) -> list[EngineClient]:
        """Those that run and those that are about to get requests."""
        return list(_that_run(self._connected).values())

    def _routable(self) -> dict[int, EngineClient]:
        """The engines that answer, or else those that run. Raises RuntimeError if there is none."""
        running = self._running()
        if not running:
            raise RuntimeError(SHUT_DOWN if self._is_shut_down else NONE_RUNS)
        return {number: each for number, each in running.items() if each.is_healthy} or running

    def _ask_all(self, question: Callable[[EngineClient], Answer]) -> dict[int, Answer]:
        """Leaves out an engine that ends meanwhile."""
        answers = {}
        for number, client in self._routable().items():
            with suppress(RuntimeError):
                answers[number] = question(client)
        if not answers:
            raise RuntimeError(NONE_RUNS)
        return answers

    async def _keep_connected(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(ConnectionError, FileNotFoundError, RuntimeError):
                path = self._paths[number]
                _, connection = await loop.create_unix_connection(EngineConnection, path)
                await self._use(number, connection, await asyncio.shield(connection.limits))
                await asyncio.shield(connection.closed)
                self._router.forget(number)
            await asyncio.sleep(RETRY_SECONDS)

    async def _use(self, number: int, connection: EngineConnection, limits: RequestLimits) -> None:
        """An engine gets requests once it has the weights and adapters in force, and sleeps or is
        paused as the others."""
        if not hasattr(self, "_intake"):
            self.max_seq_len = limits.max_seq_len
            self._intake = Intake(self.args, self._tokenizer, limits)
        # Engines on devices with less free memory have smaller caches.
        self.max_seq_len = min(self.max_seq_len, limits.max_seq_len)
        self._intake.limit_sequences(self.max_seq_len)
        client = EngineClient(
            self.args,
            self._tokenizer,
            connection,
            limits,
            self._timeout,
            self._intake,
            partial(self._router.read, number),
            partial(_in_thread, self._draft.swap_back),
            f"engine {number}",
        )
        self._connected[number] = client
        await asyncio.to_thread(self._target.settle, client)
        await asyncio.to_thread(self._sleep.settle, client)
        await asyncio.to_thread(self.adapters.settle, client)
        self._clients[number] = client
        _in_thread(self._draft.settle, client)
        self._first.set()


def _that_run(clients: Mapping[int, EngineClient]) -> dict[int, EngineClient]:
    return {number: each for number, each in sorted(clients.items()) if each.is_running}


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


# What the HTTP server works with: in this process, in another one, or in several. Methods have the
# meaning that they have in `LLM`.
Engine: TypeAlias = "EngineClient | Replicas | LLM"
