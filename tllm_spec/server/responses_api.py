"""OpenAI's `/v1/responses`: its body, reduced to what a chat request can say, and its answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tllm_spec.config.neighbours import Ignored
from tllm_spec.outputs import RequestOutput
from tllm_spec.server.answers import Json, usage_of
from tllm_spec.server.blocks import (
    CALL,
    REASONING,
    TEXT,
    Block,
    BlockAnswer,
    Kind,
    Step,
    chat_choice,
    chat_format,
    named_event,
)
from tllm_spec.server.bodies import BodyModel, as_json_type, as_typed
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.chat_message import (
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    FunctionDefinition,
    ToolCall,
)
from tllm_spec.server.protocol import NOT_STORED, ChatCompletionRequest, ClientRequest
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
ITEMS_NOT_SERVED: Mapping[str, str] = {
    "item_reference": f"{NOT_STORED}; send the item itself",
    "": "messages, functions and reasoning are served",
}
TOOLS_NOT_SERVED: Mapping[str, str] = {"": "the server runs no tools; clients run functions"}
TEXT_TYPES = ("input_text", "output_text", "text")
REASONING_TYPES = ("reasoning_text", "summary_text", "text")


def _check_plain(value: object) -> object:
    """Raises ValueError for what an answer cannot repeat: NaN and infinities."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the value cannot be written as JSON: {error}") from error
    return value


def _text_of(content: object, types: Sequence[str] = TEXT_TYPES) -> object:
    """The text of an item; parts of text are joined. Raises ValueError for other parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in types:
            raise ValueError(f"parts have one of the types {', '.join(types)}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part has no text")
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str, BeforeValidator(_text_of), as_json_type(str | list[dict[str, str]])]
ReasoningText = Annotated[
    str,
    BeforeValidator(partial(_text_of, types=REASONING_TYPES)),
    as_json_type(list[dict[str, str]]),
]


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


ITEMS: Mapping[str, type[BodyModel]] = {
    "message": InputItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}
AnyItem = InputItem | ReasoningItem | CallItem | CallOutputItem


def _as_items(given: object) -> object:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ValueError("a text or a list of messages is needed")
    if not given:
        raise ValueError("at least one item is needed")
    return as_typed(given, ITEMS, ITEMS_NOT_SERVED, "message")


def _messages(items: Sequence[AnyItem]) -> Iterator[ChatMessage]:
    """The items as messages of a chat: reasoning, text and calls of one answer are one message."""
    turn: Json = {}  # of the assistant, so far
    for item in items:
        if isinstance(item, CallItem):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
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

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

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


def _as_tools(given: object) -> object:
    return as_typed(given, {"function": FlatTool}, TOOLS_NOT_SERVED)


def _as_choice(given: object) -> object:
    """A text, or the choice of a function as a chat request has it."""
    if isinstance(given, dict) and given.keys() == {"type", "name"}:
        if given["type"] == "function" and isinstance(given["name"], str):
            return chat_choice(given["name"])
    elif given in ("none", "auto", "required"):
        return given
    raise ValueError(
        'none, auto, required or a function is needed: {"type": "function", "name": "..."}'
    )


class ResponsesRequest(ClientRequest):
    """Body of `/v1/responses`."""

    input: Annotated[
        str | list[AnyItem], BeforeValidator(_as_items), as_json_type(str | list[dict[str, Any]])
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[
        list[FlatTool] | None, BeforeValidator(_as_tools), Field(max_length=MAX_TOOLS)
    ] = None
    tool_choice: Annotated[
        str | Json, BeforeValidator(_as_choice), as_json_type(str | dict[str, str])
    ] = "auto"
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
        messages = []
        if self.instructions is not None:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += _messages(self.input)
        tools = [
            {"function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        given: Json = {
            "model": self.model,
            "messages": messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": None if self.text is None else chat_format(self.text.format),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "tools": tools or None,
            "tool_choice": self.tool_choice if tools or self.tool_choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return ChatCompletionRequest(**given)


# Answers of `/v1/responses`: one object, or the events that build it.


INCOMPLETE = {"length": "max_output_tokens"}
ID_PREFIXES: Mapping[Kind, str] = {REASONING: "rs", TEXT: "msg", CALL: "fc"}
EVENTS: Mapping[Kind, str] = {
    REASONING: "response.reasoning_text",
    TEXT: "response.output_text",
    CALL: "response.function_call_arguments",
}
LOGPROBS: Mapping[Kind, Json] = {TEXT: {"logprobs": []}}


class ResponseAnswer(BlockAnswer):
    """The answer to one request with one sample: each block is an item."""

    def __init__(
        self, body: ResponsesRequest, tokenizer: Tokenizer, parsed: ParsedText | None
    ) -> None:
        super().__init__(tokenizer, parsed)
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())  # noqa: TID251  # a date
        self._num_events = 0

    def _object(self, results: Sequence[RequestOutput]) -> Json:
        finish = str(results[0].outputs[0].finish_reason)
        reason, usage = INCOMPLETE.get(finish), usage_of(results)
        return self._response(
            "completed" if reason is None else "incomplete",
            output=[_item(block, _status(block)) for block in self._blocks.all],
            incomplete_details=None if reason is None else {"reason": reason},
            usage={
                "input_tokens": usage["prompt_tokens"],
                # Nothing is billed for what is kept in the cache.
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens(results)},
                "total_tokens": usage["total_tokens"],
            },
        )

    def _response(self, status: str, **own: Any) -> Json:
        body, choice = self._body, self._body.tool_choice
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
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": (
                choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
            ),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            **own,
        }

    def _begun(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        begun = self._response("in_progress", output=[], incomplete_details=None, usage=None)
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=begun)

    def _events(self, step: Step) -> Iterator[bytes]:
        block, name = step.block, EVENTS[step.block.kind]
        at: Json = {"output_index": block.index}
        inside = {"item_id": _item_id(block), **at}
        if has_part := block.kind != CALL:
            inside["content_index"] = 0
        logprobs = LOGPROBS.get(block.kind, {})
        if step.kind == "grow":
            yield self._event(f"{name}.delta", **inside, delta=step.text, **logprobs)
        elif step.kind == "open":
            item = _item(block, "in_progress")
            yield self._event("response.output_item.added", **at, item=item)
            if has_part:
                yield self._event("response.content_part.added", **inside, part=_part(block, ""))
        else:
            text = {"text" if has_part else "arguments": block.text}
            called = {} if has_part else {"name": block.name}
            yield self._event(f"{name}.done", **inside, **text, **logprobs, **called)
            if has_part:
                part = _part(block, block.text)
                yield self._event("response.content_part.done", **inside, part=part)
            item = _item(block, _status(block))
            yield self._event("response.output_item.done", **at, item=item)

    def _ended(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        answer = self._object(results)
        yield self._event(f"response.{answer['status']}", response=answer)

    def _failed(self, refusal: RequestRefused) -> bytes:
        error = refusal.body["error"]
        return self._event("error", message=error["message"], code=error["type"], param=None)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return named_event(kind, sequence_number=self._num_events - 1, **fields)


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _item_id(block: Block) -> str:
    return f"{ID_PREFIXES[block.kind]}_{block.id}"


def _item(block: Block, status: str) -> Json:
    """In progress it is empty: its events make it grow."""
    has_begun = status != "in_progress"
    own: Json = {"id": _item_id(block), "status": status}
    content = [_part(block, block.text)] if has_begun else []
    if block.kind == CALL:
        arguments = block.text if has_begun else ""
        called = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
        return {"type": "function_call", **own, **called}
    if block.kind == REASONING:
        return {"type": "reasoning", **own, "summary": [], "content": content}
    return {"type": "message", **own, "role": "assistant", "content": content}


def _part(block: Block, text: str) -> Json:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
