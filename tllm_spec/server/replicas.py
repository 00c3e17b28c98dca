"""Several engines with the whole model each, as one: every request goes to the engine that the
router chooses. An engine that ends takes its own requests with it, and is used again once it has
been started again. All of them replace their weights, or none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.executor.resources.radix import block_hashes
from tllm_spec.intake import Intake, Prompt
from tllm_spec.lora_request import CacheSalt, salt_of
from tllm_spec.outputs import FIRST_VERSION
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.server.adapters import Adapters
from tllm_spec.server.engine_client import SHUT_DOWN, Answer, EngineClient, EngineConnection, in_all
from tllm_spec.server.fleet_sleep import FleetSleep
from tllm_spec.server.in_force import Part, ServedWeights, adapters_in_force, weights_in_force
from tllm_spec.shared_tensors import SharedTensors
from tllm_spec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm_spec.llm import LLM

# Replaces the weights of several engines, of the draft network or of the target: in all of them, or
# in none. Requests go on meanwhile; each runs with the weights that its engine has.
#
# What is served is written before and after the engines do it (`in_force`). So whatever ends in the
# middle, an engine or the front that asks, all engines come back to what is written.


logger = logging.getLogger(__name__)


class Swaps:
    """first: what is served before any swap. keep: the engines' step that brings one to what is
    served. running: the engines that run. Its methods wait for them."""

    def __init__(
        self,
        part: Part,
        first: ServedWeights,
        keep: str,
        engine_paths: Sequence[str],
        running: Callable[[], Sequence[EngineClient]],
    ) -> None:
        self._part, self._first, self._keep_step = part, first, keep
        self._in_force = weights_in_force(engine_paths[0], part)
        self._num_engines = len(engine_paths)
        self._running = running

    @contextmanager
    def held(self) -> Iterator[ServedWeights]:
        """What is served. Raises RuntimeError if nothing can be replaced."""
        try:
            with self._in_force.held() as served:
                yield served or self._first
        except OSError as error:
            raise RuntimeError(
                f"no engine has replaced its {self._part} weights: {error}"
            ) from error

    def settle(self, engine: EngineClient) -> None:
        """Brings an engine that has connected to what is served: a front, or the engine, may have
        ended in the middle of a swap."""
        try:
            if self._in_force.read() is not None:
                with self.held() as served:
                    self._keep(served, engine)
        except (OSError, RuntimeError) as error:
            logger.error("an engine may have other weights than the others: %s", error)

    def _replace(
        self,
        served: ServedWeights,
        new: ServedWeights,
        stage: Callable[[EngineClient], dict[str, Any]],
        commit: Callable[[EngineClient], dict[str, Any]],
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What the steps of each engine return. Raises RuntimeError, too, if an engine does not
        run, or ends before all have replaced their weights."""
        engines = self._running()
        if len(engines) < self._num_engines:
            why = f"{self._part} weights are replaced in all engines or in none"
            raise RuntimeError(f"an engine is being started; {why}")
        try:
            staged = in_all(engines, stage)
            self._in_force.write(replace(served, last=new.last))
            committed = in_all(engines, commit)
            self._in_force.write(new)
        except (RuntimeError, ValueError, OSError):
            in_all(engines, partial(self._keep, served))
            raise
        return staged, committed

    def _keep(self, served: ServedWeights, engine: EngineClient) -> None:
        try:
            engine.swap_step(self._keep_step, served.folder, served.version)
        except (RuntimeError, ValueError) as error:
            if not engine.is_running:
                return  # it reads what is served when it is started again
            logger.error("an engine may not have the weights of %s: %s", served.folder, error)


class DraftSwaps(Swaps):
    """The texts of requests do not depend on draft weights."""

    def __init__(
        self, first: str, engine_paths: Sequence[str], running: Callable[[], Sequence[EngineClient]]
    ) -> None:
        super().__init__("draft", ServedWeights(first, 0, None, 0), "keep", engine_paths, running)

    def swap(self, folder: str, *, keep_cache: bool, force: bool) -> dict[str, Any]:
        """As `LLM.load_draft_weights`. Raises RuntimeError, too, as `_replace` does."""
        with self.held() as served:
            return self._swap(served, folder, served.folder, keep_cache=keep_cache, force=force)

    def swap_back(self, folder: str) -> None:
        """An engine has found these weights worse than those before. Every front calls this, and
        the first one swaps."""
        try:
            with self.held() as served:
                if served.folder == folder and served.before is not None:
                    self._swap(served, served.before, None, keep_cache=False, force=True)
        except (RuntimeError, ValueError) as error:
            logger.error("the engines keep the draft weights of %s: %s", folder, error)

    def _swap(
        self,
        served: ServedWeights,
        folder: str,
        before: str | None,
        *,
        keep_cache: bool,
        force: bool,
    ) -> dict[str, Any]:
        """before: as of `ServedWeights`, after the swap."""
        version, first = served.last + 1, self._running()[:1]
        (told, *_), _ = self._replace(
            served,
            ServedWeights(folder, version, before, version),
            lambda engine: engine.swap_step("stage", folder, force or engine not in first),
            lambda engine: engine.swap_step("commit", keep_cache, version),
        )
        return {"version": version, "folder": folder} | told


class TargetUpdates(Swaps):
    """Versions are names."""

    def __init__(
        self, first: str, engine_paths: Sequence[str], running: Callable[[], Sequence[EngineClient]]
    ) -> None:
        served = ServedWeights(first, FIRST_VERSION, None, 0)
        super().__init__("target", served, "keep_update", engine_paths, running)

    def update(self, folder: str, version: str | None, part: str, running: str) -> dict[str, Any]:
        """As `LLM.update_weights`, of a folder, and of all engines or none."""
        begin = monotonic()
        with self.held() as served:
            number = served.last + 1
            new = ServedWeights(folder, version or str(number), served.folder, number)
            _, told = self._replace(
                served,
                new,
                lambda engine: engine.swap_step("stage_update", folder, new.version, part, running),
                lambda engine: engine.swap_step("commit_update"),
            )
        stopped = max(each["stopped_seconds"] for each in told)
        staged = monotonic() - begin - stopped
        return {"version": new.version, "staged_seconds": staged, "stopped_seconds": stopped}


# Which of several engines gets a request: the one that has most of its prompt in the prefix cache.
#
# The router reads the KV events that routers outside of the server get, too. A busy engine is
# passed over, whatever it has cached.


# An engine with more unfinished tokens than this many times the mean is busy, if it also has so
# many more than the mean.
BUSY_FACTOR, BUSY_TOKENS = 1.5, 8192


class PrefixRouter:
    """Knows what each engine has cached, by its number."""

    def __init__(self, num_engines: int, page_size: int) -> None:
        self._page_size = page_size
        self._cached: list[set[int]] = [set() for _ in range(num_engines)]

    def read(self, engine: int, payload: bytes) -> None:
        """payload: a batch of KV events."""
        cached = self._cached[engine]
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            self._apply(cached, event)

    def forget(self, engine: int) -> None:
        """Forgets the cache of an engine that has ended."""
        self._cached[engine].clear()

    def hashes(self, tokens: Sequence[int], salt: CacheSalt) -> list[int]:
        """Hashes the prompt's pages, for `choose`."""
        return block_hashes(tokens, self._page_size, salt)

    def choose(self, hashes: Sequence[int], unfinished: Mapping[int, int]) -> int:
        """unfinished: tokens of the requests that each engine has, of those that may be chosen.
        Among equal prefixes the engine with the fewest gets the request, and among equally busy
        engines the one that has the least cached."""
        mean = sum(unfinished.values()) / len(unfinished)
        limit = max(BUSY_FACTOR * mean, mean + BUSY_TOKENS)
        free = [engine for engine, tokens in unfinished.items() if tokens <= limit]

        def rank(engine: int) -> tuple[int, int, int]:
            num_cached = self.num_cached(engine, hashes)
            return -num_cached, unfinished[engine], len(self._cached[engine])

        return min(free, key=rank)

    def num_cached(self, engine: int, hashes: Sequence[int]) -> int:
        """Pages of the prompt that the engine would reuse. Where layers see a window, pages before
        the last one may be gone."""
        cached = self._cached[engine]
        for number in range(len(hashes), 0, -1):
            if hashes[number - 1] in cached:
                return number
        return 0

    @staticmethod
    def _apply(cached: set[int], event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "BlockStored":
            cached.update(event["block_hashes"])
        elif kind == "BlockRemoved":
            cached.difference_update(event["block_hashes"])
        else:
            cached.clear()


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
        self._clients: dict[int, EngineClient] = {}
        first = str(getattr(args.speculative_config, "speculative_model", ""))
        self._swaps = DraftSwaps(first, paths, self.running_engines)
        self._updates = TargetUpdates(args.model, paths, self.running_engines)
        self._sleep = FleetSleep(paths[0], self.running_engines)
        self.adapters = Adapters(adapters_in_force(paths[0]), self.running_engines)
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
        return self._swaps.swap(folder, keep_cache=keep_cache, force=force)

    def update_weights(
        self, source: str | SharedTensors, version: str | None, part: str, running: str
    ) -> dict[str, Any]:
        """As `LLM.update_weights`, of a folder: in all engines, or in none. A restarted engine
        reads it again, so tensors of another process raise ValueError."""
        if isinstance(source, SharedTensors):
            raise ValueError("several engines (--dp_size) take weights of a folder only")
        with self._sleep.updating():
            return self._updates.update(source, version, part, running)

    def pause(self, mode: str) -> None:
        """As `LLM.pause`, of all engines."""
        in_all(self.running_engines(), lambda engine: engine.pause(mode))

    def resume(self) -> None:
        """As `LLM.resume`."""
        in_all(self.running_engines(), EngineClient.resume)

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
        for client in self._clients.values():
            client.shutdown()

    def running_engines(self) -> list[EngineClient]:
        return list(self._running().values())

    def _running(self) -> dict[int, EngineClient]:
        """By number, in order."""
        return {number: each for number, each in sorted(self._clients.items()) if each.is_running}

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
            with suppress(ConnectionError, FileNotFoundError):
                path = self._paths[number]
                _, connection = await loop.create_unix_connection(EngineConnection, path)
                await self._use(number, connection, await asyncio.shield(connection.limits))
                await asyncio.shield(connection.closed)
                self._router.forget(number)
            await asyncio.sleep(RETRY_SECONDS)

    async def _use(self, number: int, connection: EngineConnection, limits: RequestLimits) -> None:
        """An engine gets requests once it has the weights and adapters in force."""
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
            partial(_in_thread, self._swaps.swap_back),
            f"engine {number}",
        )
        await asyncio.to_thread(self._updates.settle, client)
        if (mode := self.pause_mode) is not None:
            await asyncio.to_thread(client.pause, mode)
        joins = partial(self._clients.__setitem__, number, client)
        if self.args.lora_config is None:
            joins()
        else:
            await asyncio.to_thread(self.adapters.settle, client, joins)
        _in_thread(self._sleep.settle, client)
        _in_thread(self._swaps.settle, client)
        self._first.set()


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


# What the HTTP server works with: in this process, in another one, or in several. Methods have the
# meaning that they have in `LLM`.
Engine: TypeAlias = "EngineClient | Replicas | LLM"
