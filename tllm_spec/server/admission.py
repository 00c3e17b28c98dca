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

from fastapi.concurrency import run_in_threadpool

from tllm_spec.request_errors import (
    AdaptersInUse,
    ContextLengthExceeded,
    EnginePaused,
    GrammarsUnavailable,
)
from tllm_spec.sampling_params import RequestOptions, SamplingParams
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.guard import CLIENT_CLOSED_REQUEST
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.refusals import RequestRefused, first_mistakes, overloaded
from tllm_spec.server.streaming import unless_disconnected

if TYPE_CHECKING:
    from starlette.requests import Request

    from tllm_spec.request_handle import RequestHandle
    from tllm_spec.server.replicas import Engine


ENGINE_DOWN = "the engine is down"
SPARE_PART = 8  # an eighth of the places is added for clients that have at most an eighth of these
# Threads that wait for grammars. What they have asked for is compiled even if the client leaves.
MAX_COMPILING = 64
MAX_KNOWN_GRAMMARS = 4096

MIB = 1 << 20
# JSON takes so much for one log probability, with the token's text and bytes, and for one token of
# a prompt.
LOGPROB_BYTES = 100
TOKEN_BYTES = 8

# Bytes of an answer: of all prompts and their log probabilities, which are certain, and of each
# generated token beyond its text, which --max_request_tokens limits.
AnswerSize = tuple[int, int]


def size_of(
    prompt_lens: Sequence[int], params: SamplingParams, *, echo: bool, own_field: bool
) -> AnswerSize:
    """Estimated before any work: what log probabilities and echoed prompts add to an answer.

    prompt_lens: tokens, at most. echo: every choice begins with the prompt, and with its log
    probabilities if those of the output are wanted. own_field: each prompt's log probabilities are
    sent once, in a field of their own."""
    of_prompt = _entries(params.prompt_logprobs) * LOGPROB_BYTES
    of_output = _entries(params.logprobs) * LOGPROB_BYTES
    num_copies = int(own_field) + (params.n if echo and params.logprobs is not None else 0)
    per_prompt_token = num_copies * of_prompt + (params.n * TOKEN_BYTES if echo else 0)
    return sum(prompt_lens) * per_prompt_token, of_output


def _entries(num_best: int | None) -> int:
    """Entries of one token: the best ones, and the token itself."""
    return 0 if num_best is None else num_best + 1


SAME: Mapping[str, str] = {}

Result = TypeVar("Result")


class Admission:
    """Counts what clients, by their key's name or address, and their requests have at a time."""

    def __init__(self, llm: Engine, options: ServerOptions) -> None:
        self._llm, self._options = llm, options
        self._max_choices = llm.args.max_batch_size * options.dp_size + options.max_queue_size
        self._num_starting = 0  # choices whose prompts are being tokenised
        self._choices: Counter[str] = Counter()  # by client
        self._num_held = 0  # bytes of answers that are certain
        # Tokenising a long prompt takes seconds. It must delay neither the answers of other
        # requests nor short prompts, so it has a thread of its own. Only tokenizers implemented in
        # Rust are thread-safe.
        # A chat template may take seconds, too.
        self._is_fast = bool(getattr(llm.tokenizer, "is_fast", False))
        kinds = ("", "long-", "chat-", "long-chat-") if self._is_fast else ("",)
        self._intakes = [ThreadPoolExecutor(1, f"tllm-{kind}intake") for kind in kinds]
        # Compiling a grammar may take seconds. One client, by its key's name or address, has one
        # grammar compiled at a time, and others do not wait for it.
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, "tllm-compiling")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()  # need not wait for that

    def close(self) -> None:
        for intake in (*self._intakes, self._compiling):
            intake.shutdown(wait=intake is not self._compiling, cancel_futures=True)

    def admit(
        self, request: Request, params: SamplingParams, num_prompts: int, size: AnswerSize
    ) -> SamplingParams:
        """Counts a request until its answer has been sent. Returns its parameters; max_tokens is
        lowered to what fits where the request does not limit it. Raises RequestRefused for more
        than one request or one client may have."""
        num_choices, (prompt_bytes, _) = num_prompts * params.n, size
        state = request.scope["state"]
        allowed = within_budget(params, num_prompts, self._options.max_request_tokens)
        allowed = self._within_bytes(allowed, num_choices, size)
        self._check_share(state["client"], num_choices)
        self._count(state["client"], num_choices, prompt_bytes)
        state["num_own_choices"] = self._choices[state["client"]]
        state["at_end"].append(partial(self._count, state["client"], -num_choices, -prompt_bytes))
        return allowed

    def _count(self, client: str, num_choices: int, num_bytes: int) -> None:
        self._num_held += num_bytes
        self._choices[client] += num_choices
        if not self._choices[client]:
            del self._choices[client]

    def _within_bytes(
        self, params: SamplingParams, num_choices: int, size: AnswerSize
    ) -> SamplingParams:
        (prompt_bytes, per_token), limit = size, self._options.max_answer_bytes
        left, longest = limit - prompt_bytes, self._llm.max_seq_len
        if left < 0:
            raise self._too_large(prompt_bytes)
        if per_token:
            most = left // (per_token * num_choices)
            if params.max_tokens is None and most < longest:
                params = replace(params, max_tokens=max(most, 1))
            num_tokens = min(params.max_tokens or 0, longest)
            if num_tokens > most:
                raise self._too_large(prompt_bytes + per_token * num_choices * num_tokens)
        if self._num_held + prompt_bytes > limit:
            raise overloaded(503, "too many large answers at once")
        return params

    def _too_large(self, num_bytes: int) -> RequestRefused:
        limit = self._options.max_answer_bytes
        return RequestRefused(
            400,
            f"the answer may have {-(-num_bytes // MIB)} MiB of log probabilities and echoed "
            f"prompts, and {limit // MIB} MiB are accepted; lower n, max_tokens or the "
            "number of log probabilities, or send several requests",
        )

    def _check_share(self, client: str, num_choices: int) -> None:
        limit, num_own = self._options.max_client_choices, self._choices[client]
        if limit is not None and num_choices > limit:
            raise RequestRefused(
                400,
                f"the request asks for {num_choices} choices and one client may have "
                f"{limit} at a time; send several requests, one after the other",
            )
        if limit is not None and num_own + num_choices > limit:
            message = f"one client may have {limit} choices at a time, and you have {num_own}"
            raise overloaded(429, message)

    async def start(
        self,
        request: Request,
        prompts: Callable[[], Sequence[str | list[int]]],
        params: SamplingParams,
        options: RequestOptions,
        *,
        num_prompts: int = 1,
        is_chat: bool = False,
        names: Mapping[str, str] = SAME,
    ) -> list[RequestHandle]:
        """Starts a request for each prompt. names: as in `bad_request`. Raises RequestRefused when
        one cannot be served; then none keeps running."""
        num_choices, state = num_prompts * params.n, request.scope["state"]
        self._check_room(num_choices, state.get("num_own_choices", num_choices))

        def start() -> list[RequestHandle]:
            handles: list[RequestHandle] = []
            try:
                for prompt in prompts():
                    handles.append(self._llm.submit(prompt, params, options))
            except (ValueError, RuntimeError):
                for handle in handles:
                    handle.abort()
                raise
            return handles

        def start_again(handle: RequestHandle) -> RequestHandle:
            again = self._llm.submit(handle.prompt_token_ids, params, options)
            again.prompt = handle.prompt
            return again

        request.state.start_again = start_again
        self._num_starting += num_choices
        try:
            with bad_request(names), engine_running():
                self._check_max_tokens(params)
                await self._compile_grammar(request, params)
                size = state.get("body_size", 0)
                return await self._in_intake(size, start, is_chat=is_chat)
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
        if self._is_fast:
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
        number = (num_bytes > LONG_BODY) + 2 * is_chat
        intake = self._intakes[number if self._is_fast else 0]
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
            raise overloaded(429, "too many requests are waiting")

    def _check_max_tokens(self, params: SamplingParams) -> None:
        longest = self._llm.max_seq_len
        name = "min_tokens" if params.min_tokens > longest else "max_tokens"
        if (getattr(params, name) or 0) > longest:
            raise ContextLengthExceeded(
                f"{name} = {getattr(params, name)}: this model's maximum context length is "
                f"{longest} tokens, prompt and output together"
            )


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
        raise RequestRefused(400, first_mistakes(message), code=code) from error


@contextmanager
def engine_running() -> Iterator[None]:
    """Answers a RuntimeError inside, which says that the engine has ended, with 503."""
    try:
        yield
    except (AdaptersInUse, EnginePaused, GrammarsUnavailable) as error:
        raise RequestRefused(503, str(error)) from error
    except RuntimeError as error:
        raise RequestRefused(503, f"{ENGINE_DOWN}: {error}") from error
