"""Answers of `/v1/responses`: one object, or the events that build it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.refusals import error_body
from tllm_spec.server.responses import Json, usage_of
from tllm_spec.server.responses_protocol import ResponsesRequest
from tllm_spec.server.streaming import EngineError, Running

INCOMPLETE = {"length": "max_output_tokens"}


class ResponseAnswer:
    """The answer to one request with one sample."""

    def __init__(self, body: ResponsesRequest, parsed: ParsedText | None = None) -> None:
        """parsed: finds the answer in the text, without reasoning; None: the text is the answer."""
        self._body, self._parsed, self._text = body, parsed, ""
        self._num_read = 0  # characters of the output
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._created = int(time.time())  # noqa: TID251  # a date
        self._num_events = 0

    def whole(self, result: RequestOutput) -> Json:
        """The answer without streaming."""
        output = result.outputs[0]
        self._new_text(output)
        status = "incomplete" if output.finish_reason in INCOMPLETE else "completed"
        reason = INCOMPLETE.get(str(output.finish_reason))
        usage = usage_of([result])
        return self._object(
            status,
            output=[self._item(status, [_part(self._text)])],
            incomplete_details=None if reason is None else {"reason": reason},
            usage={
                "input_tokens": usage["prompt_tokens"],
                # Nothing is billed for what is kept in the cache.
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        )

    async def events(self, running: Running) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. A request that fails ends with an error event."""
        begun = self._object("in_progress", output=[], incomplete_details=None, usage=None)
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=begun)
        yield self._event(
            "response.output_item.added", output_index=0, item=self._item("in_progress", [])
        )
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", **place, part=_part(""))
        async with aclosing(running.updates()) as updates:
            try:
                async for _, result in updates:
                    if delta := self._new_text(result.outputs[0]):
                        yield self._event(
                            "response.output_text.delta", **place, delta=delta, logprobs=[]
                        )
            except EngineError as error:
                message = error_body(str(error), error.kind)["error"]["message"]
                yield self._event("error", message=message, code=error.kind, param=None)
                return
        answer = self.whole(running.handles[0])
        (item,), part = answer["output"], _part(self._text)
        yield self._event("response.output_text.done", **place, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{answer['status']}", response=answer)

    def _new_text(self, output: CompletionOutput) -> str:
        """What is new since the last call."""
        new = output.text[self._num_read :]
        self._num_read += len(new)
        if self._parsed is not None:
            new = self._parsed.read(new, output, is_parallel=True).get("content", "")
        self._text += new
        return new

    def _object(self, status: str, **own: Any) -> Json:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": body.model,
            "status": status,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            **own,
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
