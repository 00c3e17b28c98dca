"""Turns running requests into one HTTP answer, streamed or whole.

Both consume one generator of updates. Closing it, as when the client disconnects, aborts the
requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tllm_spec.lora_request import NOT_LOADED
from tllm_spec.outputs import RequestOutput
from tllm_spec.request_errors import NO_GUIDED_TOKEN, SLOW_GRAMMAR
from tllm_spec.server.answers import Answer, usage_of
from tllm_spec.server.protocol import StreamOptions
from tllm_spec.server.refusals import RequestRefused

if TYPE_CHECKING:
    from tllm_spec.request_handle import RequestHandle
    from tllm_spec.server.blocks import BlockAnswer

Result = TypeVar("Result")
Updates = AsyncGenerator[tuple[int, RequestOutput], None]

# nginx would collect the events of some tenths of a second.
EVENT_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Running:
    """The requests of one HTTP request. timeout: seconds that they may take. `on_end` is called at
    the end with every output, also with one that failed or was cancelled. again: submits a request
    once more, whose adapter made room for others before it reached the engine; None: it fails."""

    def __init__(
        self,
        handles: Sequence[RequestHandle],
        timeout: float,
        on_end: Callable[[RequestOutput], None] = lambda output: None,
        again: Callable[[RequestHandle], Awaitable[RequestHandle]] | None = None,
    ) -> None:
        self.handles, self.timeout, self._on_end = list(handles), timeout, on_end
        self._again = again

    def num_tokens(self) -> tuple[int, int]:
        """Counts the tokens of all prompts, and of all outputs so far."""
        usage = usage_of(self.handles)
        return usage["prompt_tokens"], usage["completion_tokens"]

    def abort(self) -> None:
        for handle in self.handles:
            handle.abort()

    async def updates(self) -> Updates:
        """Yields `(index of the handle, its output so far)` for each update. An output must be read
        before the next update, which changes it.

        Raises RequestRefused when a request fails. Requests that still run when the generator is
        closed are aborted."""
        is_late = False

        def end() -> None:
            nonlocal is_late
            is_late = True
            for handle in self.handles:
                handle.abort()
                handle.fail("")

        timer = asyncio.get_running_loop().call_later(self.timeout, end)
        streams = [self._results(i) for i in range(len(self.handles))]
        updates = streams[0] if len(streams) == 1 else _merged(streams)
        try:
            async with aclosing(updates):
                async for i, result in updates:
                    if is_late:
                        raise RequestRefused(
                            504, f"the request took longer than {self.timeout:g} s"
                        )
                    if result.error is not None:
                        is_own = result.error in (NO_GUIDED_TOKEN, SLOW_GRAMMAR)
                        status = 404 if _lacks_adapter(result) else 500
                        raise RequestRefused(400 if is_own else status, result.error)
                    yield i, result
        finally:
            timer.cancel()
            self.abort()
            for handle in self.handles:
                self._on_end(handle)

    async def _results(self, i: int) -> Updates:
        async for result in self.handles[i]:
            if self._again is None or not _lacks_adapter(result):
                yield i, result
                continue
            self.handles[i] = await self._again(self.handles[i])
            async for later in self.handles[i]:
                yield i, later


def _lacks_adapter(result: RequestOutput) -> bool:
    return result.error is not None and result.error.endswith(NOT_LOADED)


async def _merged(streams: Sequence[Updates]) -> Updates:
    waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            finished, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                i, update = waiting.pop(task), task.result()
                if update is None:
                    continue
                yield update
                waiting[asyncio.ensure_future(anext(streams[i], None))] = i
    finally:
        for task in waiting:
            task.cancel()


async def finished_outputs(running: Running) -> list[RequestOutput]:
    """The outputs once every request has finished. Raises RequestRefused."""
    results: dict[int, RequestOutput] = {}
    async with aclosing(running.updates()) as outputs:
        async for i, result in outputs:
            results[i] = result
    return [results[i] for i in range(len(running.handles))]


async def event_stream(
    answer: Answer | BlockAnswer,
    running: Running,
    options: StreamOptions,
    in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. A request that fails ends the stream with an error event.
    in_thread: does work that takes long."""
    handles = running.handles
    if options.include_usage:
        answer.chunk_usage = {"usage": None}  # as at OpenAI
    yield answer.begun(handles)
    async with aclosing(running.updates()) as outputs:
        try:
            async for i, result in outputs:
                counts = usage_of(handles) if options.continuous_usage_stats else None
                if answer.starts_slowly(i, result):
                    yield await in_thread(partial(answer.events, i, result, counts))
                else:
                    yield answer.events(i, result, counts)
        except RequestRefused as refusal:
            yield answer.failed(refusal)
            return
    end = partial(answer.ended, handles)
    yield await in_thread(end) if answer.is_slow(handles) else end()


class EventStream(Response):
    """A streamed answer. When the client disconnects, its generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=EVENT_STREAM_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        # Our own server's connections can write at once.
        write_part = scope["state"].get("write_part", lambda data: False)
        sending = asyncio.ensure_future(_send_all(self._events, send, write_part))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()


async def _send_all(
    events: AsyncGenerator[bytes, None], send: Send, write_part: Callable[[bytes], bool]
) -> None:
    async with aclosing(events):
        async for data in events:
            if data and not write_part(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None when the client disconnects first; then `work` is cancelled."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
