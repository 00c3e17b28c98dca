"""Admits requests: checks that there is room and that they fit the model, tokenises them, and
starts them. What one client and one request may take is limited, so that others get their part."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from tllm_spec.request_errors import ContextLengthExceeded, GrammarsUnavailable
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.guard import CLIENT_CLOSED_REQUEST, NOBODY, Caller
from tllm_spec.server.refusals import RequestRefused, first_mistakes
from tllm_spec.server.streaming import unless_disconnected

if TYPE_CHECKING:
    from starlette.requests import Request

    from tllm_spec.request_handle import RequestHandle
    from tllm_spec.server.engine import Engine


# What one client and one request may take of the server, so that others get their part.


class ClientShares:
    """Counts the choices that clients, by their key's name or address, have at a time. limit: None
    for any number."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    def take(self, request: Request, num_choices: int) -> None:
        """Counts the choices of a request until its answer has been sent, and writes the client's
        new number to the scope's state. Raises RequestRefused for more than the limit."""
        state = request.scope["state"]
        client = state["client"]
        if self._limit is not None:
            self._check(client, num_choices, self._limit)
        self._taken[client] += num_choices
        state["num_own_choices"] = self._taken[client]
        state["at_end"].append(partial(self._give_back, client, num_choices))

    def _check(self, client: str, num_choices: int, limit: int) -> None:
        if num_choices > limit:
            raise RequestRefused(
                400,
                f"the request asks for {num_choices} choices and one client may have "
                f"{limit} at a time; send several requests, one after the other",
            )
        if self._taken[client] + num_choices > limit:
            raise RequestRefused(
                429,
                f"one client may have {limit} choices at a time, and you have "
                f"{self._taken[client]}",
                "overloaded",
                retry_after=RETRY_AFTER,
            )

    def _give_back(self, client: str, num_choices: int) -> None:
        self._taken[client] -= num_choices
        if not self._taken[client]:
            del self._taken[client]


def within_budget(
    params: SamplingParams, num_prompts: int, max_tokens: int | None
) -> SamplingParams:
    """max_tokens: that all choices of a request may have together, None for any number. It is
    divided among the choices of a request that does not limit them itself. Raises RequestRefused
    for a request that asks for more."""
    if max_tokens is None:
        return params
    num_choices = num_prompts * params.n
    share = max_tokens // num_choices
    if (params.max_tokens or 1) > share:
        raise RequestRefused(
            400,
            f"the request asks for {num_choices} choices of {params.max_tokens or 1} tokens and "
            f"the server generates {max_tokens} tokens for one request; lower max_tokens or n",
        )
    return params if params.max_tokens is not None else replace(params, max_tokens=share)


# Admits requests: checks that there is room and that they fit the model, tokenises them, and
# starts them.


ENGINE_DOWN = "the engine is down"
RETRY_AFTER = 1  # seconds
SPARE_PART = 8  # an eighth of the places is added for clients that have at most an eighth of these
# Threads that wait for grammars. What they have asked for is compiled even if the client leaves.
MAX_COMPILING = 64
MAX_KNOWN_GRAMMARS = 4096

SAME: Mapping[str, str] = {}

Result = TypeVar("Result")


class Admission:
    """max_queue_size: choices that may wait for a place in the batch of one of the engines."""

    def __init__(self, llm: Engine, max_queue_size: int, num_engines: int = 1) -> None:
        self._llm = llm
        self._max_choices = llm.args.max_batch_size * num_engines + max_queue_size
        self._num_starting = 0  # choices whose prompts are being tokenised
        # Tokenising a long prompt takes seconds. It must delay neither the answers of other
        # requests nor short prompts, so it has a thread of its own. Only tokenizers implemented in
        # Rust are thread-safe.
        self._intake = self._long_intake = _one_thread("tllm-intake")
        self._chat_intake = self._long_chat_intake = self._intake
        if getattr(llm.tokenizer, "is_fast", False):
            self._long_intake = _one_thread("tllm-long-intake")
            # A chat template may take seconds, too.
            self._chat_intake = _one_thread("tllm-chat-intake")
            self._long_chat_intake = _one_thread("tllm-long-chat-intake")
        # Compiling a grammar may take seconds. One client, by its key's name or address, has one
        # grammar compiled at a time, and others do not wait for it.
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, "tllm-compiling")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()  # need not wait for that

    def close(self) -> None:
        of_prompts = self._intake, self._long_intake, self._chat_intake, self._long_chat_intake
        for intake in (*of_prompts, self._compiling):
            intake.shutdown(wait=intake is not self._compiling, cancel_futures=True)

    async def start(
        self,
        request: Request,
        num_prompts: int,
        num_bytes: int,
        prompts: Callable[[], Sequence[str | list[int]]],
        params: SamplingParams,
        *,
        streaming: bool,
        is_chat: bool = False,
        caller: Caller = NOBODY,
        names: Mapping[str, str] = SAME,
    ) -> list[RequestHandle]:
        """Starts a request for each prompt. num_bytes: of the HTTP body. names: as in
        `bad_request`. Raises RequestRefused when one cannot be served; then none keeps running."""
        num_choices = num_prompts * params.n
        own = request.scope["state"].get("num_own_choices", num_choices)
        self._check_room(num_choices, own)

        def start() -> list[RequestHandle]:
            handles: list[RequestHandle] = []
            try:
                for prompt in prompts():
                    handles.append(
                        self._llm.generate_async(
                            prompt,
                            params,
                            streaming=streaming,
                            cache_salt=caller.cache_salt,
                            client=caller.client,
                            store=caller.store,
                        )
                    )
            except (ValueError, RuntimeError):
                for handle in handles:
                    handle.abort()
                raise
            return handles

        self._num_starting += num_choices
        try:
            with bad_request(names), engine_running():
                self._check_max_tokens(params)
                await self._compile_grammar(request, params)
                return await self._in_intake(num_bytes, start, is_chat=is_chat)
        finally:
            self._num_starting -= num_choices

    async def _compile_grammar(self, request: Request, params: SamplingParams) -> None:
        """Raises ValueError for a grammar that cannot be used, and RequestRefused when the client
        leaves: a grammar that waits for another one of its client is not compiled then."""
        if params.guided_decoding is None:
            return
        source = params.guided_decoding.source
        key = sha256(f"{source.kind} {source.text}".encode()).digest()
        if key in self._known_grammars:
            return

        async def compiled() -> bool:
            turn = self._turns.setdefault(request.scope["state"]["client"], asyncio.Lock())
            await turn.acquire()
            loop, compile_grammar = asyncio.get_running_loop(), self._llm.compile_grammar
            compiling = loop.run_in_executor(self._compiling, compile_grammar, params)
            compiling.add_done_callback(lambda _: turn.release())
            await asyncio.shield(compiling)  # if the client leaves, its turn ends with the thread
            return True

        if not await unless_disconnected(request, compiled()):
            raise RequestRefused(CLIENT_CLOSED_REQUEST, "the client has left")
        self._known_grammars[key] = None
        if len(self._known_grammars) > MAX_KNOWN_GRAMMARS:
            self._known_grammars.popitem(last=False)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of long work with the tokenizer, which delays no prompts where the tokenizer
        is thread-safe."""
        if self._long_intake is not self._intake:
            return await run_in_threadpool(work)
        return await self._in_intake(0, work)

    async def tokenised(
        self, num_bytes: int, work: Callable[[], Result], *, is_chat: bool = False
    ) -> Result:
        """The result of work with the tokenizer. Raises RequestRefused for a ValueError."""
        with bad_request():
            return await self._in_intake(num_bytes, work, is_chat=is_chat)

    async def _in_intake(
        self, num_bytes: int, work: Callable[[], Result], *, is_chat: bool = False
    ) -> Result:
        if num_bytes > LONG_BODY:
            intake = self._long_chat_intake if is_chat else self._long_intake
        else:
            intake = self._chat_intake if is_chat else self._intake
        return await asyncio.get_running_loop().run_in_executor(intake, work)

    def _check_room(self, num_choices: int, num_own: int) -> None:
        """num_own: choices that the client has then. Clients with few have places that a client
        with many cannot take."""
        if num_choices > self._max_choices:
            raise RequestRefused(
                400,
                f"the request asks for {num_choices} choices and the server takes "
                f"{self._max_choices} at once; send several requests",
            )
        spare = self._max_choices // SPARE_PART
        limit = self._max_choices + (spare if num_own <= max(1, spare // SPARE_PART) else 0)
        if self._llm.num_unfinished + self._num_starting + num_choices > limit:
            raise RequestRefused(
                429, "too many requests are waiting", "overloaded", retry_after=RETRY_AFTER
            )

    def _check_max_tokens(self, params: SamplingParams) -> None:
        longest = self._llm.max_seq_len
        name = "min_tokens" if params.min_tokens > longest else "max_tokens"
        if (getattr(params, name) or 0) > longest:
            raise ContextLengthExceeded(
                f"{name} = {getattr(params, name)}: this model's maximum context length is "
                f"{longest} tokens, prompt and output together"
            )


@contextmanager
def bad_request(names: Mapping[str, str] = SAME) -> Iterator[None]:
    """Answers a ValueError inside, which is the client's mistake, with 400. names: the client's own
    names of options, by the names that messages begin with."""
    try:
        yield
    except ValueError as error:
        is_too_long = isinstance(error, ContextLengthExceeded)
        code = "context_length_exceeded" if is_too_long else None
        message = re.sub(
            r"^\w+", lambda found: names.get(found[0], found[0]), str(error), flags=re.M
        )
        raise RequestRefused(400, first_mistakes(message.split("\n")), code=code) from error


@contextmanager
def engine_running() -> Iterator[None]:
    """Answers a RuntimeError inside, which says that the engine has ended, with 503."""
    try:
        yield
    except GrammarsUnavailable as error:
        raise RequestRefused(503, str(error), "internal_error") from error
    except RuntimeError as error:
        raise RequestRefused(503, f"{ENGINE_DOWN}: {error}", "internal_error") from error


def _one_thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
