"""The output of one request, like a future: wait for it, await it, iterate it or abort it.

The executor's thread only queues responses here. Text is made in the reader's thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from time import monotonic
from typing import cast

from tllm_spec.executor.request import Response
from tllm_spec.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from tllm_spec.progress import progress
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.stop_strings import StreamedText
from tllm_spec.text.tokenizer import IncrementalDetokenizer, Tokenizer


class Sample:
    """A growing output. Holds back the last tokens while they may be the beginning of a stop
    string."""

    def __init__(
        self, output: CompletionOutput, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self._output = output
        self._params = params
        self._text: StreamedText | None = None
        if tokenizer is not None and (params.detokenize or params.stop_strings):
            skips = params.skip_special_tokens
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips)
            wants_begins = params.logprobs is not None
            self._text = StreamedText(detokenizer, params.stop_strings, wants_begins=wants_begins)
        self._held_token_ids: list[int] = []
        self._held_logprobs: list[dict[int, Logprob]] = []

    def grow(self, response: Response) -> None:
        """Adds a response that is not the last."""
        piece, num_tokens = "", None
        if self._text is not None:
            piece = self._text.feed(response.token_ids)
            num_tokens = self._text.num_shown
        self._show(piece, response.token_ids, response.logprobs, num_tokens)

    def finish(self, response: Response) -> None:
        """Adds the last response. Stop words are not part of the output unless asked for."""
        token_ids, match = response.token_ids, response.stop_match
        if isinstance(response.stop_reason, int) and not self._params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        logprobs = response.logprobs[: len(token_ids)]
        rest = self._text.finish(token_ids, match.text if match else None) if self._text else ""
        self._show(rest, token_ids, logprobs, match.num_tokens if match else None)

    def _show(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]],
        num_tokens: int | None,
    ) -> None:
        """Adds `text` to the output, and held and new tokens until it has `num_tokens` (None:
        all)."""
        self._held_token_ids += token_ids
        self._held_logprobs += logprobs
        output, start = self._output, self._output.length
        count = None if num_tokens is None else num_tokens - start
        output.token_ids += self._held_token_ids[:count]
        output.logprobs += self._held_logprobs[:count]
        del self._held_token_ids[:count], self._held_logprobs[:count]
        if self._text is not None and self._params.detokenize:
            output.text += text
            output.text_offsets += self._text.token_begins[start : output.length]


class RequestHandle(RequestOutput):
    """A `RequestOutput` that is still growing.

    `result()` and `await` return the finished output. Iterating (`for`, `async for`) returns it
    each time it has grown. None of them raises for a request that has failed: the output's `error`
    says why, and what was generated before stays. `abort()` ends the request. Only one reader may
    use it. It equals only itself; a copy or a pickle is a plain `RequestOutput`."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        cancel: Callable[[], None],
    ) -> None:
        outputs = [CompletionOutput(index) for index in range(params.n)]
        super().__init__(request_id, prompt, prompt_token_ids, outputs, RequestMetrics(monotonic()))
        # None when finished, so that outputs do not keep the LLM alive.
        self._cancel: Callable[[], None] | None = cancel
        self._samples = [Sample(output, params, tokenizer) for output in outputs]
        self._arrived: deque[tuple[Response, float]] = deque()  # with the times of their arrivals
        self._changed = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None  # of the reader that awaits

    def __reduce__(self) -> tuple[type[RequestOutput], tuple[object, ...]]:
        return RequestOutput, tuple(getattr(self, each.name) for each in fields(RequestOutput))

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(RequestOutput)}
        return repr(RequestOutput(**values))

    def receive(self, response: Response) -> None:
        """Called by the executor's thread."""
        with self._changed:
            self._arrived.append((response, monotonic()))
            self._changed.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            _wake(waiter)

    def fail(self, message: str) -> None:
        """Ends the request with an error, without waiting for the engine."""
        for index in range(len(self.outputs)):
            response = Response(self.request_id, [], index, finish_reason="error", error=message)
            self.receive(response)

    def abort(self) -> None:
        """Ends the request; what was generated so far stays. No effect after its end."""
        cancel = self._cancel  # read once: another thread may set it to None
        if cancel is not None:
            cancel()

    def result(self, timeout: float | None = None) -> "RequestHandle":
        """Waits for the end of the request. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else monotonic() + timeout
        while not self.finished:
            self._wait(None if deadline is None else deadline - monotonic())
        return self

    async def aresult(self) -> "RequestHandle":
        """The same as `await`."""
        while not self.finished:
            await self._await_response()
        return self

    def __await__(self) -> Generator[None, None, "RequestHandle"]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator["RequestHandle"]:
        return self

    def __next__(self) -> "RequestHandle":
        if self.finished:
            raise StopIteration
        self._start_next_diff()
        self._wait(None)
        return self

    def __aiter__(self) -> "RequestHandle":
        return self

    async def __anext__(self) -> "RequestHandle":
        if self.finished:
            raise StopAsyncIteration
        self._start_next_diff()
        await self._await_response()
        return self

    def _wait(self, timeout: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived, timeout):
                raise TimeoutError(f"request {self.request_id} has not finished in time")
        self._read()

    async def _await_response(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._arrived:
                waiter.set_result(None)
            else:
                self._waiter = waiter
        try:
            await waiter
        finally:
            self._waiter = None
        self._read()

    def _start_next_diff(self) -> None:
        for output in self.outputs:
            output.start_next_diff()

    def _read(self) -> None:
        while self._arrived:
            # Removed after it was applied: if a user's tokenizer raises, the next read does, too.
            self._apply(*self._arrived[0])
            self._arrived.popleft()

    def _apply(self, response: Response, time: float) -> None:
        output = self.outputs[response.index]
        if output.finish_reason is not None:
            return  # `fail` came first
        metrics = self.metrics
        metrics.first_scheduled_time = _earlier(
            metrics.first_scheduled_time, response.first_scheduled_time
        )
        metrics.first_token_time = _earlier(metrics.first_token_time, response.first_token_time)
        self.cached_tokens = max(self.cached_tokens, response.cached_tokens)
        if response.prompt_logprobs is not None:
            for each in self.outputs:  # they are the same for all samples, and come with the first
                each.prompt_logprobs = response.prompt_logprobs
        if response.finish_reason is None:
            self._samples[response.index].grow(response)
            return
        self._samples[response.index].finish(response)
        if output.logprobs:
            chosen = zip(output.token_ids, output.logprobs, strict=True)
            output.cumulative_logprob = sum(entry[token].logprob for token, entry in chosen)
        output.finish_reason = cast(FinishReason, response.finish_reason)
        output.stop_reason = response.stop_reason
        output.weight_begins = response.weight_versions
        output.speculative_decoding = response.speculative
        self.error = self.error or response.error
        if all(each.finish_reason is not None for each in self.outputs):
            self.finished, self._cancel = True, None
            self.metrics.finished_time = time


class Results:
    """The unfinished requests by the executor's request id. The executor's thread holds this
    instead of the LLM, so that an unused LLM can be collected."""

    def __init__(self) -> None:
        self._handles: dict[int, RequestHandle] = {}

    def add(self, request_id: int, handle: RequestHandle) -> None:
        self._handles[request_id] = handle

    def ids(self) -> list[int]:
        return list(self._handles)

    def respond(self, responses: list[Response]) -> None:
        """Called by the executor's thread."""
        for response in responses:
            handle = self._handles[response.request_id]
            if response.finish_reason is not None:
                del self._handles[response.request_id]
            handle.receive(response)

    def fail_all(self, message: str) -> None:
        """The executor has ended: answers all requests with an error."""
        for request_id, handle in list(self._handles.items()):
            index = request_id - handle.request_id  # the samples of a request have consecutive ids
            handle.receive(Response(request_id, [], index, finish_reason="error", error=message))
        self._handles.clear()


def _earlier(known: float | None, new: float | None) -> float | None:
    """The earlier one of a moment of several samples."""
    return new if known is None else known if new is None else min(known, new)


def _wake(waiter: asyncio.Future[None]) -> None:
    """Wakes the waiter, from any thread. A front process receives responses in the reader's own
    event loop, where `call_soon_threadsafe` would cost a system call for each of them."""
    loop = waiter.get_loop()
    if asyncio._get_running_loop() is loop:
        _set(waiter)
    else:
        with suppress(RuntimeError):  # the event loop was closed: no reader is left
            loop.call_soon_threadsafe(_set, waiter)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def wait_for_all(results: Sequence[RequestHandle]) -> list[RequestOutput]:
    """Waits for all of them, with a bar."""
    outputs, num_tokens, start = list[RequestOutput](), 0, monotonic()
    with progress("Processed requests", len(results), "requests") as bar:
        for result in results:
            outputs.append(result.result())
            num_tokens += sum(each.length for each in outputs[-1].outputs)
            speed = num_tokens / (monotonic() - start)
            bar.advance(note=f"{speed:.0f} tokens/s")
    return outputs
