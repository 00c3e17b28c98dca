"""Several engines with the whole model each, as one: every request goes to the engine that the
router chooses. An engine that ends takes its own requests with it, and is used again once it has
been started again. All of them swap draft weights, or none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.executor.resources.radix import block_hashes
from tllm_spec.intake import Intake, Prompt
from tllm_spec.lora_request import CacheSalt, salt_of
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.server.adapters import Adapters
from tllm_spec.server.engine_client import SHUT_DOWN, Answer, EngineClient, EngineConnection, in_all
from tllm_spec.server.in_force import ServedDraft, adapters_in_force, draft_in_force
from tllm_spec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tllm_spec.llm import LLM

# Swaps the draft weights of several engines: all of them swap, or none. The texts of their
# requests do not depend on it, so requests go on meanwhile.
#
# What is served is written before and after the engines swap (`in_force`). So whatever ends in
# the middle, an engine or the front that asks, all engines come back to what is written.


logger = logging.getLogger(__name__)


class DraftSwaps:
    """first: the folder that is served before any swap. running: the engines that run. Its methods
    wait for them."""

    def __init__(
        self,
        engine_paths: Sequence[str],
        first: str,
        running: Callable[[], Sequence[EngineClient]],
    ) -> None:
        self._in_force = draft_in_force(engine_paths[0])
        self._first = ServedDraft(first, 0, None, 0)
        self._num_engines = len(engine_paths)
        self._running = running

    def swap(self, folder: str, *, keep_cache: bool, force: bool) -> dict[str, Any]:
        """As `LLM.load_draft_weights`. Raises RuntimeError, too, if an engine does not run, or ends
        before all have swapped."""
        try:
            with self._in_force.held() as served:
                served = served or self._first
                return self._swap(served, folder, served.folder, keep_cache=keep_cache, force=force)
        except OSError as error:
            raise RuntimeError(f"no engine has swapped its draft weights: {error}") from error

    def swap_back(self, folder: str) -> None:
        """An engine has found these weights worse than those before. Every front calls this, and
        the first one swaps."""
        try:
            with self._in_force.held() as served:
                if served is not None and served.folder == folder and served.before is not None:
                    self._swap(served, served.before, None, keep_cache=False, force=True)
        except (RuntimeError, ValueError, OSError) as error:
            logger.error("the engines keep the draft weights of %s: %s", folder, error)

    def settle(self, engine: EngineClient) -> None:
        """Brings an engine that has connected to what is served: a front, or the engine, may have
        ended in the middle of a swap."""
        try:
            if self._in_force.read() is not None:
                with self._in_force.held() as served:
                    _keep(served or self._first, engine)
        except OSError as error:
            logger.error("an engine may have other draft weights than the others: %s", error)

    def _swap(
        self, served: ServedDraft, folder: str, before: str | None, *, keep_cache: bool, force: bool
    ) -> dict[str, Any]:
        """before: as of `ServedDraft`, after the swap."""
        engines = self._running()
        if len(engines) < self._num_engines:
            raise RuntimeError(
                "an engine is being started; draft weights are swapped in all engines or in none"
            )

        def stage(engine: EngineClient) -> dict[str, Any]:
            return engine.swap_step("stage", folder, force or engine is not engines[0])

        version = served.last + 1
        try:
            told = in_all(engines, stage)[0]
            self._in_force.write(replace(served, last=version))
            in_all(engines, lambda engine: engine.swap_step("commit", keep_cache, version))
            self._in_force.write(ServedDraft(folder, version, before, version))
        except (RuntimeError, ValueError, OSError):
            in_all(engines, partial(_keep, served))
            raise
        return {"version": version, "folder": folder} | told


def _keep(served: ServedDraft, engine: EngineClient) -> None:
    try:
        engine.swap_step("keep", served.folder, served.version)
    except (RuntimeError, ValueError) as error:
        if not engine.is_running:
            return  # it reads what is served when it is started again
        logger.error("an engine may not have the draft weights of %s: %s", served.folder, error)


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
        self._swaps = DraftSwaps(paths, first, self.running_engines)
        self.adapters = Adapters(adapters_in_force(paths[0]), self.running_engines)
        self._joining: set[EngineClient] = set()  # which may lack adapters: they get no requests
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

    pause_mode = None  # weights of several engines are not updated

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
        return {
            number: each
            for number, each in sorted(self._clients.items())
            if each.is_running and each not in self._joining
        }

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
                self._use(number, connection, await asyncio.shield(connection.limits))
                await asyncio.shield(connection.closed)
                self._router.forget(number)
            await asyncio.sleep(RETRY_SECONDS)

    def _use(self, number: int, connection: EngineConnection, limits: RequestLimits) -> None:
        if not self._clients:
            self.max_seq_len = limits.max_seq_len
            self._intake = Intake(self.args, self._tokenizer, limits)
        # Engines on devices with less free memory have smaller caches.
        self.max_seq_len = min(self.max_seq_len, limits.max_seq_len)
        self._intake.limit_sequences(self.max_seq_len)
        client = self._clients[number] = EngineClient(
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
        if self.args.lora_config is None:
            self._first.set()
        else:
            self._joining.add(client)
            joined = partial(asyncio.get_running_loop().call_soon_threadsafe, self._first.set)
            _in_thread(self._join, client, joined)
        _in_thread(self._swaps.settle, client)

    def _join(self, client: EngineClient, joined: Callable[[], object]) -> None:
        self.adapters.settle(client, lambda: self._joining.discard(client))
        joined()


def _in_thread(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


# What the HTTP server works with: in this process, in another one, or in several. Methods have the
# meaning that they have in `LLM`.
Engine: TypeAlias = "EngineClient | Replicas | LLM"
