"""OpenAI's `/v1/responses`: its body, reduced to what a chat request can say, and its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from tllm_spec.config.config_base import ConfigError
from tllm_spec.config.neighbours import Ignored
from tllm_spec.config.option_checks import MAX_UNKNOWN, shown
from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.server.answers import Json, usage_of
from tllm_spec.server.bodies import BodyModel, as_json_type
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.chat_message import ChatMessage
from tllm_spec.server.protocol import NOT_STORED, ChatCompletionRequest, ClientRequest
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.server.streaming import Running

# The body of OpenAI's `/v1/responses`, reduced to what a chat request can say: text.


TEXT_ONLY = "answers have text only"
NO_TOOLS = "use /v1/chat/completions for tools"
# Options of a body, by the names that the chat request's messages begin with.
CHAT_NAMES: Mapping[str, str] = {
    "guided_decoding": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
ITEMS_NOT_SERVED: Mapping[str, str] = {
    "item_reference": f"{NOT_STORED}; send the item itself",
    "reasoning": "answers here have none",
    "function_call": NO_TOOLS,
    "function_call_output": NO_TOOLS,
}
TEXT_TYPES = ("input_text", "output_text", "text")


def _check_plain(value: object) -> object:
    """Raises ValueError for what an answer cannot repeat: NaN and infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the value cannot be written as JSON: {error}") from error
    return value


def _text_of(content: object) -> object:
    """The text of an item; parts of text are joined. Raises ValueError for other parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXT_TYPES:
            raise ValueError(f"parts have one of the types {', '.join(TEXT_TYPES)}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part has no text")
        texts.append(part["text"])
    return "".join(texts)


class InputItem(BodyModel):
    """A message of the conversation. id and status are those of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of), as_json_type(str | list[dict[str, str]])]
    id: str | None = None
    status: str | None = None


def _as_items(given: object) -> object:
    """Only the first mistake is named: thousands would take seconds to describe."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ValueError("a text or a list of messages is needed")
    if not given:
        raise ValueError("at least one item is needed")
    kinds = {item["type"]: None for item in given if isinstance(item.get("type"), str)}
    if others := [kind for kind in kinds if kind != "message"]:
        raise ConfigError(
            [
                f"type = {shown(kind)} is refused: {ITEMS_NOT_SERVED.get(kind, TEXT_ONLY)}; "
                "accepted: 'message'"
                for kind in others[:MAX_UNKNOWN]
            ]
        )
    return [InputItem(**item) for item in given]


class TextOptions(BodyModel):
    """format: OpenAI's, as `response_format` of a chat request, with the schema not nested."""

    format: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None

    ignored: ClassVar[Ignored] = {"verbosity": ("medium",)}

    def response_format(self) -> dict[str, Any] | None:
        """The response format as a chat request has it."""
        given = self.format
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": given}


class ResponsesRequest(ClientRequest):
    """Body of `/v1/responses`."""

    input: Annotated[
        str | list[InputItem], BeforeValidator(_as_items), as_json_type(str | list[dict[str, Any]])
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None

    ignored: ClassVar[Ignored] = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "parallel_tool_calls": (True, False),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    def to_chat(self) -> ChatCompletionRequest:
        """The chat request that has the same answer."""
        messages = []
        if self.instructions is not None:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += [ChatMessage(role=item.role, content=item.content) for item in self.input]
        return ChatCompletionRequest(
            model=self.model,
            messages=messages,
            stream=self.stream,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=None if self.text is None else self.text.response_format(),
        )


# Answers of `/v1/responses`: one object, or the events that build it.


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

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        """As `Answer.is_slow`."""
        return False

    def whole(self, results: Sequence[RequestOutput]) -> Json:
        """The answer without streaming."""
        output = results[0].outputs[0]
        self._new_text(output)
        status = "incomplete" if output.finish_reason in INCOMPLETE else "completed"
        reason = INCOMPLETE.get(str(output.finish_reason))
        usage = usage_of(results)
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
            except RequestRefused as refusal:
                error = refusal.body["error"]
                yield self._event("error", message=error["message"], code=error["type"], param=None)
                return
        answer = self.whole(running.handles)
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
            new = self._parsed.read(new, output).get("content", "")
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
