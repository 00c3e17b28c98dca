"""An engine in another process, with the interface that `LLM` has for the HTTP server.

Requests are checked and tokenised here, and text is made here. The connection belongs to the event
loop; the methods may be called from any thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request import Response, StopChecker, StopMatch
from tllm_spec.executor.request_wire import RequestLimits, pack_requests
from tllm_spec.intake import Intake, Prompt, Submission
from tllm_spec.outputs import Logprob
from tllm_spec.request_errors import REFUSING_MODES, EnginePaused, GrammarsUnavailable
from tllm_spec.request_handle import RequestHandle
from tllm_spec.sampling_params import DEFAULT_OPTIONS, RequestOptions, SamplingParams
from tllm_spec.server.child import engine_process
from tllm_spec.server.wire import new_unpacker, pack, unpack_response
from tllm_spec.server_info import server_info
from tllm_spec.shared_tensors import SharedTensors
from tllm_spec.text.tokenizer import Tokenizer

# A request that runs in the engine's process, as a front process sees it: it looks for the stop
# strings here.


@dataclass(slots=True)
class RemoteSample:
    """index: which of a prompt's samples it is. num_wanted: tokens of the prompt, and of the output
    at most. checker: None without stop strings."""

    handle: RequestHandle
    index: int
    num_wanted: int
    checker: StopChecker | None = None
    min_tokens: int = 0
    num_tokens: int = 0
    match: StopMatch | None = None
    # The tokens from the last ones shown to the end of the stop string.
    last_token_ids: list[int] = field(default_factory=list)
    last_logprobs: Sequence[dict[int, Logprob]] = ()

    def checked(self, response: Response) -> tuple[Response | None, bool]:
        """What the reader gets, and whether the engine must be told to stop.

        The engine goes on for a round or two after a stop string. What it says then is dropped, but
        for its last response, which has the figures of speculation."""
        if self.checker is None:
            return response, False
        if self.match is not None:
            return (self._ended(response), False) if response.finish_reason else (None, False)
        end = self._find_stop(response)
        if end is None:
            return response, False
        self.last_token_ids = response.token_ids[:end]
        self.last_logprobs = response.logprobs[:end]
        if response.finish_reason is not None:
            return self._ended(response), False
        return None, True

    def _find_stop(self, response: Response) -> int | None:
        """How many of the new tokens there are up to the end of a stop string. An end token that
        completes one ends the text as an end token, as in the engine."""
        assert self.checker is not None
        for number, token in enumerate(response.token_ids, start=1):
            self.num_tokens += 1
            match = self.checker.feed(token)
            is_end = response.finish_reason == "stop" and number == len(response.token_ids)
            if match is not None and self.num_tokens > self.min_tokens and not is_end:
                self.match = match
                return number
        return None

    def _ended(self, last: Response) -> Response:
        assert self.match is not None
        return replace(
            last,
            token_ids=self.last_token_ids,
            logprobs=self.last_logprobs,
            finish_reason="error" if last.error else "stop",
            stop_reason=self.match.stop,
            stop_match=self.match,
        )


logger = logging.getLogger(__name__)

# Seconds that the engine has for work of its threads: to compile a grammar, which is given up much
# earlier, and for a step: to load weights, replay requests with them, or end them before a pause.
WORK_SECONDS = {"compile": 60.0, "step": 600.0}
QUESTIONS_PAUSE = 0.25  # of the time-out, between an answer and the next question
SHUT_DOWN = "the server is shutting down"


class EngineConnection(asyncio.Protocol):
    """Messages of the engine, as they come. `limits` is set by its first one, `closed` at the
    end. Others wait for a client."""

    def __init__(self) -> None:
        self.limits: asyncio.Future[RequestLimits] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message: Callable[[Sequence[Any]], None] | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._unpacker = new_unpacker()
        self._transport: asyncio.Transport | None = None

    def serve(
        self, on_message: Callable[[Sequence[Any]], None], on_lost: Callable[[], None]
    ) -> None:
        """Gives the client what has come and what will come."""
        self._on_message, self._on_lost = on_message, on_lost
        self.data_received(b"")
        if self.closed.done():
            on_lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        if self._on_message is not None:
            for message in self._unpacker:
                self._on_message(message)
        elif not self.limits.done() and (message := next(self._unpacker, None)) is not None:
            kind, limits = message
            assert kind == "hello", message
            self.limits.set_result(RequestLimits(**limits | {"end_ids": tuple(limits["end_ids"])}))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.limits.done():
            self.limits.set_exception(ConnectionError("the engine's process has ended"))
            self.limits.exception()  # or asyncio logs it if no task waits for the limits
        self._on_lost()
        self.closed.set_result(None)

    def send(self, message: bytes) -> None:
        """message: packed, so that what cannot be packed fails before anything is counted."""
        assert self._transport is not None
        self._transport.write(message)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


class EngineClient:
    """Made in the event loop of the connection."""

    def __init__(
        self,
        args: LlmArgs,
        tokenizer: Tokenizer,
        connection: EngineConnection,
        limits: RequestLimits,
        timeout: float | None = None,
        intake: Intake | None = None,
        on_kv_events: Callable[[bytes], None] = lambda payload: None,
        on_worse: Callable[[str], None] = lambda folder: None,
        name: str = "the engine",
    ) -> None:
        """timeout: seconds in which the engine must answer between two rounds; None: any. intake:
        one that several engines share. name: the engine's, in messages."""
        self.args = args
        self.tokenizer: Tokenizer | None = tokenizer
        self.max_seq_len = limits.max_seq_len
        self._intake = intake or Intake(args, tokenizer, limits)
        self._on_kv_events, self._on_worse = on_kv_events, on_worse
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._samples: dict[int, RemoteSample] = {}
        self._asked: dict[int, Future[Any]] = {}
        self._question_ids = count(1)
        self._num_own_tokens = 0  # that the samples want
        self._num_in_engine = self._num_tokens_in_engine = 0  # of all fronts
        self._down: str | None = None
        self.pause_mode: str | None = None
        self._timeout, self._name = timeout, name
        self._is_late = False
        ended = f"{engine_process(args.tensor_parallel_size)} has ended"
        connection.serve(self._receive, lambda: self._fail(ended))
        if timeout is not None:
            self._ask_again()

    @property
    def is_healthy(self) -> bool:
        return self._down is None and not self._is_late

    @property
    def is_running(self) -> bool:
        """Whether the engine may still answer, late or not."""
        return self._down is None

    @property
    def num_unfinished(self) -> int:
        """Counts the samples of all fronts, as far as this one knows."""
        return max(len(self._samples), self._num_in_engine)

    @property
    def num_unfinished_tokens(self) -> int:
        """The same in tokens: those of the prompts, and of the outputs at most."""
        return max(self._num_own_tokens, self._num_tokens_in_engine)

    def check_length(self, text: str | Sequence[int]) -> None:
        """As `LLM.check_length`."""
        self._intake.check_length(text)

    def compile_grammar(self, params: SamplingParams) -> None:
        """As `LLM.compile_grammar`. Not from the event loop: it waits for the engine."""
        source = self._intake.reasoning.grammar_of(params)
        if source is not None:
            try:
                self._ask("compile", source.kind, source.text)
            except RuntimeError as error:
                if self._down is not None:
                    raise
                raise GrammarsUnavailable(f"guided decoding is not available: {error}") from error

    def submit(
        self, inputs: Prompt, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> RequestHandle:
        """As `LLM.submit`."""
        self._check_alive()
        return self.start(self._intake.submission(inputs, params, options))

    def start(self, made: Submission) -> RequestHandle:
        """Sends the requests of a prompt to the engine. Raises ValueError for what cannot be sent;
        then they count nowhere."""
        self._check_alive()
        if self.pause_mode in REFUSING_MODES:
            raise EnginePaused
        for request in made.requests:
            # Stop strings are looked for here, so the tokens must come as they are made.
            request.streaming = request.streaming or request.stop_checker is not None
        grammar = None if made.source is None else (made.source.kind, made.source.text)
        message = pack(["submit", *pack_requests(made.requests), grammar])
        ids = [each.request_id for each in made.requests]
        handle = made.handle(self.tokenizer, lambda: self._in_loop(self._cancel, ids, "cancelled"))
        samples = {}
        for request in made.requests:
            checker, minimum = request.stop_checker, request.rules.min_tokens
            num_tokens = request.prompt_len + request.max_tokens
            samples[request.request_id] = RemoteSample(
                handle, request.index, num_tokens, checker, minimum
            )
        self._in_loop(self._submit, samples, message)
        return handle

    def server_info(self) -> dict[str, Any]:
        """As `LLM.server_info`. Not from the event loop: it waits for the engine."""
        return server_info(self.args, self.max_seq_len, self._ask("call", "state"))

    def load_draft_weights(
        self, folder: str, *, keep_cache: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """As `LLM.load_draft_weights`. Not from the event loop."""
        return self.step("draft", "whole", folder, keep_cache, force)

    def pause(self, mode: str) -> dict[str, Any]:
        """As `LLM.pause`. Returns the `pause_mode` after it. Not from the event loop."""
        self.step("sleep", "pause", mode)
        return {"pause_mode": self.pause_mode}

    def resume(self) -> None:
        """As `LLM.resume`. Not from the event loop. Does not wait for the engine's steps."""
        self._ask("call", "resume")

    def update_weights(
        self, source: str | SharedTensors, version: str | None, part: str, running: str
    ) -> dict[str, Any]:
        """As `LLM.update_weights`, of a folder or shared tensors. Not from the event loop."""
        given: Any = source
        if isinstance(source, SharedTensors):
            given = source.model_dump(include=set(SharedTensors.model_fields))
        return self.step("target", "update", given, version, part, running)

    def sleep(self, level: int) -> dict[str, Any]:
        """As `LLM.sleep`. Not from the event loop."""
        return self.step("sleep", "sleep", level)

    def wake_up(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """As `LLM.wake_up`. Not from the event loop."""
        return self.step("sleep", "wake_up", None if tags is None else list(tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether something is asleep. Not from the event loop: it waits for the engine."""
        return bool(self._ask("call", "is_sleeping"))

    def step(self, part: str, step: str, *arguments: Any) -> dict[str, Any]:
        """As one of the engine process' `STEPS`. Not from the event loop."""
        return self._ask("step", part, step, *arguments) or {}

    def get_stats(self) -> list[dict[str, Any]]:
        """As `LLM.get_stats`. Not from the event loop."""
        return list(self._ask("call", "stats"))

    def shutdown(self) -> None:
        """Ends what still runs, with an error. May be called twice."""
        self._fail(SHUT_DOWN)
        self._connection.close()

    def _check_alive(self) -> None:
        if self._down is not None:
            raise RuntimeError(self._down)

    def _ask(self, kind: str, *question: Any) -> Any:
        """Raises ValueError where the question is a mistake, RuntimeError where the engine cannot
        answer, or not in time."""
        self._check_alive()
        answer: Future[Any] = Future()
        question_id = next(self._question_ids)
        message = pack([kind, question_id, *question])
        self._in_loop(self._send_question, question_id, message, answer)
        # The engine's threads may load weights or compile, but it has rounds all the time.
        seconds = WORK_SECONDS.get(kind, self._timeout)
        try:
            return answer.result(seconds)
        except FutureTimeout:
            raise RuntimeError(f"it has not answered for {seconds:g} s") from None

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:  # the loop is closed
            raise RuntimeError(SHUT_DOWN) from error

    # In the event loop.

    def _ask_again(self) -> None:
        """Asks the engine for a sign of life, and again some time after each answer."""
        assert self._timeout is not None
        answer: Future[Any] = Future()
        answer.add_done_callback(self._on_sign_of_life)
        self._late_timer = self._loop.call_later(self._timeout, self._on_late)
        question_id = next(self._question_ids)
        self._send_question(question_id, pack(["call", question_id, "ping"]), answer)

    def _on_late(self) -> None:
        self._is_late = True
        logger.error(
            "%s has not answered for %g s; /health says 503 until it does",
            *(self._name, self._timeout),
        )

    def _on_sign_of_life(self, answer: Future[Any]) -> None:
        assert self._timeout is not None
        self._late_timer.cancel()
        if answer.exception() is not None:
            return  # the engine is down
        if self._is_late:
            logger.warning("%s answers again", self._name)
        self._is_late = False
        self._loop.call_later(self._timeout * QUESTIONS_PAUSE, self._ask_again)

    def _submit(self, samples: dict[int, RemoteSample], message: bytes) -> None:
        if self._down is not None:
            for sample in samples.values():
                sample.handle.fail(self._down)
            return
        self._samples |= samples
        self._num_own_tokens += sum(sample.num_wanted for sample in samples.values())
        self._connection.send(message)

    def _cancel(self, ids: Sequence[int], reason: str) -> None:
        running = [request_id for request_id in ids if request_id in self._samples]
        if running and self._down is None:
            self._connection.send(pack(["cancel", running, reason]))

    def _send_question(self, question_id: int, message: bytes, answer: Future[Any]) -> None:
        if self._down is not None:
            answer.set_exception(RuntimeError(self._down))
            return
        self._asked[question_id] = answer
        self._connection.send(message)

    def _receive(self, message: Sequence[Any]) -> None:
        kind = message[0]
        if kind == "responses":
            self._num_in_engine, self._num_tokens_in_engine = message[1], message[2]
            self._respond(message[3])
        elif kind == "load":
            self._num_in_engine, self._num_tokens_in_engine = message[1], message[2]
        elif kind == "kv_events":
            self._on_kv_events(message[1])
        elif kind == "worse":
            self._on_worse(message[1])
        elif kind == "paused":
            self.pause_mode = message[1]
        elif kind == "answer":
            _, question_id, value, error, is_mistake = message
            answer = self._asked.pop(question_id, None)
            if answer is None:
                return  # a thread of the engine answers after "down"
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception((ValueError if is_mistake else RuntimeError)(error))
        else:
            assert kind == "down", kind
            self._fail(message[1])

    def _respond(self, packed_responses: Sequence[Sequence[Any]]) -> None:
        samples = self._samples
        for packed in packed_responses:
            sample = samples.get(packed[0])
            if sample is None:
                continue
            response = unpack_response(packed, sample.index)
            if response.finish_reason is not None:
                del samples[packed[0]]
                self._num_own_tokens -= sample.num_wanted
            checked, must_stop = sample.checked(response)
            if must_stop:
                self._connection.send(pack(["cancel", [packed[0]], "stop"]))
            if checked is not None:
                sample.handle.receive(checked)

    def _fail(self, reason: str) -> None:
        self._down = self._down or reason
        handles = {id(sample.handle): sample.handle for sample in self._samples.values()}
        self._samples.clear()
        self._num_own_tokens = 0
        for handle in handles.values():
            handle.fail(reason)
        for answer in self._asked.values():
            answer.set_exception(RuntimeError(reason))
        self._asked.clear()


Answer = TypeVar("Answer")


def in_all(engines: Sequence[EngineClient], step: Callable[[EngineClient], Answer]) -> list[Answer]:
    """At the same time. Raises what the first of them raises, once all have ended."""
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return list(threads.map(step, engines))
