"""Turns running requests into one HTTP answer, streamed or whole.

Both consume one generator of updates. Closing it, as when the client disconnects, aborts the
requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from tllm_spec.outputs import RequestOutput
from tllm_spec.server.protocol import StreamOptions, error_body
from tllm_spec.server.responses import Answer, Json, usage_of

if TYPE_CHECKING:
    from tllm_spec.request_handle import RequestHandle

DONE = "data: [DONE]\n\n"

Result = TypeVar("Result")
OnFinish = Callable[[RequestOutput], None]


class EngineError(Exception):
    """A request was started and failed."""


def _ignore(output: RequestOutput) -> None:
    """An `on_finish` that does nothing."""


async def updates(
    handles: Sequence[RequestHandle], on_finish: OnFinish = _ignore
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yields `(index of the handle, its output so far)` for each update. An output must be read
    before the next update, which changes it. `on_finish` is called with each finished output.

    Raises EngineError when a request fails. Requests that still run when the generator is closed
    are aborted."""
    streams = [aiter(handle) for handle in handles]
    waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            finished, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                i, result = waiting.pop(task), task.result()
                if result is None:
                    continue
                if result.error is not None:
                    raise EngineError(result.error)
                if result.finished:
                    on_finish(result)
                yield i, result
                waiting[asyncio.ensure_future(anext(streams[i], None))] = i
    finally:
        for task in waiting:
            task.cancel()
        for handle in handles:
            handle.abort()


async def finished_outputs(
    handles: Sequence[RequestHandle], on_finish: OnFinish = _ignore
) -> list[RequestOutput]:
    """The outputs once every request has finished. Raises EngineError."""
    results: dict[int, RequestOutput] = {}
    async with aclosing(updates(handles, on_finish)) as outputs:
        async for i, result in outputs:
            results[i] = result
    return [results[i] for i in range(len(handles))]


async def event_stream(
    answer: Answer, handles: Sequence[RequestHandle], options: StreamOptions, on_finish: OnFinish
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events. A request that fails ends the stream with an error
    event."""
    async with aclosing(updates(handles, on_finish)) as outputs:
        try:
            async for i, result in outputs:
                for chunk in answer.chunks(i, result):
                    yield _event(
                        chunk
                        | ({"usage": usage_of(handles)} if options.continuous_usage_stats else {})
                    )
        except EngineError as error:
            yield _event(error_body(str(error), "internal_error"))
            return
    if options.include_usage:
        yield _event(answer.usage_chunk(handles))
    yield DONE


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None when the client disconnects first; then `work` is cancelled."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
