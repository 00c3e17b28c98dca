"""OpenAI's `/v1/responses`: its body, reduced to what a chat request can say, and its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, Tag

from tllm_spec.chat_formats.pieces import CALL, CONTENT, REASONING
from tllm_spec.config.neighbours import Ignored
from tllm_spec.outputs import RequestOutput
from tllm_spec.server.answers import Json, weights_of
from tllm_spec.server.blocks import Block, BlockAnswer, named_event
from tllm_spec.server.bodies import BodyModel, as_json_type, by_type
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.chat_message import (
    MAX_TOOLS,
    ChatMessage,
    Choice,
    FunctionDefinition,
    ToolCall,
    text_of,
)
from tllm_spec.server.protocol import ChatCompletionRequest, ClientRequest, ReasoningEffort
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.tokenizer import Tokenizer

# The body of OpenAI's `/v1/responses`.


# Options of a body, by the names that the chat request's messages begin with.
CHAT_NAMES: Mapping[str, str] = {
    "guided_decoding": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


def _check_plain(value: object) -> object:
    """Raises ValueError for what an answer cannot repeat: NaN and infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the value cannot be written as JSON: {error}") from error
    return value


TEXTS = as_json_type(str | list[dict[str, str]])
Text = Annotated[str, text_of("input_text", "output_text", "text"), TEXTS]
ReasoningText = Annotated[str, text_of("reasoning_text", "summary_text", "text"), TEXTS]


class Item(BodyModel):
    """What the items of an earlier answer have; it has no effect."""

    id: str | None = None
    status: str | None = None


class InputItem(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text

    ignored: ClassVar[Ignored] = {"phase": (str,)}


class ReasoningItem(Item):
    """The reasoning of an earlier answer. What is encrypted cannot be read, and is left out."""

    type: Literal["reasoning"] = "reasoning"
    content: ReasoningText = ""
    summary: ReasoningText = ""
    encrypted_content: str | None = None


class CallItem(Item):
    """A call in an earlier answer. arguments: a JSON object as text."""

    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str

    ignored: ClassVar[Ignored] = {
        "caller": ({"type": "direct"},),
        "namespace": (),
        "parsed_arguments": (dict,),  # of openai's client, which sends its answers back
    }


class CallOutputItem(Item):
    """What a called function has returned."""

    type: Literal["function_call_output"] = "function_call_output"
    call_id: str
    output: Text

    ignored: ClassVar[Ignored] = {"caller": ({"type": "direct"},), "name": (str,)}


AnyItem = Annotated[
    Annotated[InputItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    by_type(
        "messages, reasoning, function_call and function_call_output are served, and nothing is "
        "stored: send the items themselves",
        default="message",
    ),
]


def _as_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _messages(items: Sequence[AnyItem]) -> Iterator[ChatMessage]:
    """The items as messages of a chat: reasoning, text and calls of one answer are one message."""
    turn: Json = {}  # of the assistant, so far
    for item in items:
        if isinstance(item, CallItem):
            call = ToolCall.of(item.call_id, item.name, item.arguments)
            turn.setdefault("tool_calls", []).append(call)
            continue
        is_text = isinstance(item, InputItem) and item.role == "assistant"
        goes_on = is_text and ("tool_calls" in turn or "content" not in turn)
        if turn and not goes_on:
            yield ChatMessage(role="assistant", **turn)
            turn = {}
        if isinstance(item, ReasoningItem):
            turn = {"reasoning_content": item.content or item.summary}
        elif isinstance(item, CallOutputItem):
            yield ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id)
        elif is_text:
            turn["content"] = turn.get("content", "") + item.content
        else:
            yield ChatMessage(role=item.role, content=item.content)
    if turn:
        yield ChatMessage(role="assistant", **turn)


class TextOptions(BodyModel):
    """format: OpenAI's, as `response_format` of a chat request, with the schema not nested."""

    format: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None

    ignored: ClassVar[Ignored] = {"verbosity": ("medium",)}


class ReasoningOptions(BodyModel):
    """effort is a variable of the chat template; none asks it for no reasoning. There are no
    summaries: answers have the reasoning itself."""

    effort: ReasoningEffort | None = None

    ignored: ClassVar[Ignored] = {
        "context": ("auto",),
        "generate_summary": ("auto", "concise", "detailed"),
        "mode": ("standard",),
        "summary": ("auto", "concise", "detailed"),
    }


class FlatTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    parameters: Annotated[Json | None, AfterValidator(_check_plain)] = None

    ignored: ClassVar[Ignored] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "output_schema": (),
    }


class ResponsesRequest(ClientRequest):
    """Body of `/v1/responses`."""

    # FailFast: thousands of wrong items would take seconds to describe.
    input: Annotated[
        list[AnyItem],
        Field(min_length=1),
        FailFast(),
        BeforeValidator(_as_items),
        as_json_type(str | list[dict[str, Any]]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True

    ignored: ClassVar[Ignored] = {
        "background": (False,),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is sent as it is
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    def to_chat(self) -> ChatCompletionRequest:
        """The chat request that has the same answer."""
        messages = [*_messages(self.input)]
        if self.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        tools = [tool.to_chat() for tool in self.tools or ()]
        return self.as_chat(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text and self.text.format,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            tools=tools,
            tool_choice=self.tool_choice if tools or self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls,
        )


# Answers of `/v1/responses`: one object, or the events that build it.


# Options that answers repeat.
ECHOED = {
    *("instructions", "max_output_tokens", "model", "parallel_tool_calls", "temperature"),
    *("tool_choice", "top_p"),
}
ID_PREFIXES: Mapping[str, str] = {REASONING: "rs", CONTENT: "msg", CALL: "fc"}
EVENTS: Mapping[str, str] = {
    REASONING: "response.reasoning_text",
    CONTENT: "response.output_text",
    CALL: "response.function_call_arguments",
}


class ResponseAnswer(BlockAnswer):
    """The answer to one request with one sample: each block is an item."""

    def __init__(self, body: ResponsesRequest, tokenizer: Tokenizer, parsed: ParsedText) -> None:
        super().__init__(tokenizer, parsed)
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())  # noqa: TID251  # a date
        self._num_events = 0

    def _object(self, results: Sequence[RequestOutput]) -> Json:
        is_cut, usage = results[0].outputs[0].finish_reason == "length", self.usage(results)
        return self._response(
            "incomplete" if is_cut else "completed",
            output=[_item(block) for block in self.blocks],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                # Nothing is billed for what is kept in the cache.
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            **weights_of(results[0].outputs[0]),
        )

    def _response(self, status: str, **own: Any) -> Json:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            **body.model_dump(include=ECHOED),
            **own,
        }

    def begun(self, results: Sequence[RequestOutput]) -> bytes:
        response = self._response("in_progress", output=[], incomplete_details=None, usage=None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def _step(self, kind: str, block: Block, text: str) -> Iterator[bytes]:
        name, is_call = EVENTS[block.kind], block.kind == CALL
        at: Json = {"output_index": block.index}
        inside = {"item_id": _item_id(block), **at, **({} if is_call else {"content_index": 0})}
        logprobs: Json = {"logprobs": []} if block.kind == CONTENT else {}
        if kind == "grow":
            yield self._event(f"{name}.delta", **inside, delta=text, **logprobs)
        elif kind == "open":
            item = _item(block) | {"status": "in_progress"} | ({} if is_call else {"content": []})
            yield self._event("response.output_item.added", **at, item=item)
            if not is_call:
                yield self._event("response.content_part.added", **inside, part=_part(block))
        else:
            if is_call:
                done = {"name": block.name, "arguments": block.text}
                yield self._event(f"{name}.done", **inside, **done)
            else:
                yield self._event(f"{name}.done", **inside, text=block.text, **logprobs)
                yield self._event("response.content_part.done", **inside, part=_part(block))
            yield self._event("response.output_item.done", **at, item=_item(block))

    def ended(self, results: Sequence[RequestOutput]) -> bytes:
        answer = self._object(results)
        return self._event(f"response.{answer['status']}", response=answer)

    def failed(self, refusal: RequestRefused) -> bytes:
        error = refusal.body["error"]
        return self._event("error", message=error["message"], code=error["type"], param=None)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)


def _item_id(block: Block) -> str:
    return f"{ID_PREFIXES[block.kind]}_{block.id}"


def _item(block: Block) -> Json:
    own: Json = {"id": _item_id(block), "status": "incomplete" if block.is_cut else "completed"}
    if block.kind == CALL:
        called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", **own, **called}
    own["content"] = [_part(block)]
    if block.kind == REASONING:
        return {"type": "reasoning", **own, "summary": []}
    return {"type": "message", **own, "role": "assistant"}


def _part(block: Block) -> Json:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
