"""Anthropic's `/v1/messages`: its body, reduced to what a chat request can say, and its answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field
from pydantic_core import from_json

from tllm_spec.config.config_base import check
from tllm_spec.config.neighbours import Ignored
from tllm_spec.outputs import RequestOutput
from tllm_spec.server.answers import Json, encode_compact, usage_of
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
    Name,
    ToolCall,
)
from tllm_spec.server.protocol import ChatCompletionRequest, ClientRequest, Words
from tllm_spec.server.refusals import RequestRefused, messages_error
from tllm_spec.text.tokenizer import Tokenizer

# The body of Anthropic's `/v1/messages`.


# Options of a body, by the names that the chat request's messages begin with.
CHAT_NAMES: Mapping[str, str] = {
    "guided_decoding": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
BLOCKS_NOT_SERVED: Mapping[str, str] = {
    "image": "only text is served",
    "document": "only text is served",
    "": "the server has no such blocks",
}
TOOLS_NOT_SERVED: Mapping[str, str] = {"": "the server runs no tools; clients run theirs"}
# Prefixes are always cached.
CACHE: Ignored = {"cache_control": (dict,)}
DIRECT = {"type": "direct"}


class TextBlock(BodyModel):
    """A part of a text."""

    type: Literal["text"] = "text"
    text: str

    ignored: ClassVar[Ignored] = {**CACHE, "citations": ([],)}


class ThinkingBlock(BodyModel):
    """Reasoning of an earlier answer. It is a text of the client: the signature proves nothing."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str | None = None

    ignored: ClassVar[Ignored] = CACHE


class RedactedThinkingBlock(BodyModel):
    """Reasoning of another server that cannot be read, and is left out."""

    type: Literal["redacted_thinking"] = "redacted_thinking"
    data: str

    ignored: ClassVar[Ignored] = CACHE


class ToolUseBlock(BodyModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: Json

    ignored: ClassVar[Ignored] = {**CACHE, "caller": (DIRECT,)}


TEXT_BLOCK: Mapping[str, type[BodyModel]] = {"text": TextBlock}


def _joined(given: object) -> object:
    """The text of a list of text blocks, each on a line of its own."""
    if not isinstance(given, list):
        return given
    blocks: Any = as_typed(given, TEXT_BLOCK, BLOCKS_NOT_SERVED)
    return "\n".join(block.text for block in blocks)


Text = Annotated[str, BeforeValidator(_joined), as_json_type(str | list[dict[str, str]])]


class ToolResultBlock(BodyModel):
    """What a called tool has returned. is_error: it has failed."""

    type: Literal["tool_result"] = "tool_result"
    tool_use_id: str
    content: Text = ""
    is_error: bool = False

    ignored: ClassVar[Ignored] = CACHE


BLOCKS: Mapping[str, type[BodyModel]] = {
    **TEXT_BLOCK,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
AnyBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
# The roles whose messages may have the blocks.
ROLES: Mapping[type[BodyModel], Sequence[str]] = {
    TextBlock: ("user", "assistant", "system"),
    ToolResultBlock: ("user",),
}


def _as_blocks(given: object) -> object:
    if isinstance(given, str):
        return [TextBlock(text=given)]
    return as_typed(given, BLOCKS, BLOCKS_NOT_SERVED)


class Message(BodyModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[AnyBlock],
        BeforeValidator(_as_blocks),
        as_json_type(str | list[dict[str, Any]]),
    ]

    @check
    def _check_blocks(self) -> Iterator[str]:
        others = {each.type for each in self.content if self.role not in _roles(each)}
        for kind in sorted(others):
            yield f"content has a {kind!r} block, which role = {self.role!r} cannot have"

    def to_chat(self) -> Iterator[ChatMessage]:
        """The messages of a chat that say the same."""
        if self.role == "assistant":
            yield self._answer()
            return
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield ChatMessage(role=self.role, content="\n".join(texts))
                    texts = []
                content = f"Error: {block.content}" if block.is_error else block.content
                yield ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
        if texts or not self.content:
            yield ChatMessage(role=self.role, content="\n".join(texts))

    def _answer(self) -> ChatMessage:
        thinking = [each.thinking for each in self.content if isinstance(each, ThinkingBlock)]
        texts = [each.text for each in self.content if isinstance(each, TextBlock)]
        calls = [each for each in self.content if isinstance(each, ToolUseBlock)]
        return ChatMessage(
            role="assistant",
            reasoning_content="\n".join(thinking) or None,
            content="".join(texts) if texts else None,
            tool_calls=[_call(each) for each in calls] or None,
        )


def _roles(block: BodyModel) -> Sequence[str]:
    return ROLES.get(type(block), ("assistant",))


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))


class MessagesTool(BodyModel):
    """A tool that the model may call. input_schema: a JSON schema."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: Json
    strict: bool | None = None

    ignored: ClassVar[Ignored] = {
        **CACHE,
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }

    def to_chat(self) -> Json:
        """The tool as a chat request has it."""
        given = {"description": self.description, "strict": self.strict}
        more = {name: value for name, value in given.items() if value is not None}
        return {"function": {"name": self.name, "parameters": self.input_schema, **more}}


def _as_tools(given: object) -> object:
    return as_typed(given, {"custom": MessagesTool}, TOOLS_NOT_SERVED, "custom")


class ToolChoice(BodyModel):
    """name: of the tool, with the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @check
    def _check_name(self) -> Iterator[str]:
        if (self.name is None) == (self.type == "tool"):
            yield f"type = {self.type!r}: the type tool needs a name, and no other takes one"

    def to_chat(self) -> str | Json:
        """The choice as a chat request has it."""
        if self.name is not None:
            return chat_choice(self.name)
        return "required" if self.type == "any" else self.type


class Thinking(BodyModel):
    """budget_tokens: how long the reasoning may be, with the type enabled."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None

    ignored: ClassVar[Ignored] = {"display": ("summarized",)}

    @check
    def _check_budget(self) -> Iterator[str]:
        if (self.budget_tokens is None) == (self.type == "enabled"):
            yield f"type = {self.type!r}: enabled needs budget_tokens, and no other type takes it"


class OutputConfig(BodyModel):
    """effort: a variable of the chat template. format: what the text must match, as in
    `/v1/responses`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Json | None = None


class CountTokensRequest(BodyModel):
    """Body of `/v1/messages/count_tokens`: what becomes a prompt."""

    model: str
    # FailFast: thousands of wrong messages would take seconds to describe.
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    system: Text | None = None
    tools: Annotated[
        list[MessagesTool] | None, BeforeValidator(_as_tools), Field(max_length=MAX_TOOLS)
    ] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    ignored: ClassVar[Ignored] = {
        **CACHE,
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    @check
    def _check_end(self) -> Iterator[str]:
        if self.messages[-1].role == "assistant":
            yield "messages ends with the assistant's: the beginning of an answer is not continued"

    def to_chat(self, **own: Any) -> ChatCompletionRequest:
        """The chat request that has the same prompt. own: more of its options."""
        messages = [each for message in self.messages for each in message.to_chat()]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        choice, thinking = self.tool_choice, self.thinking
        output = self.output_config or OutputConfig()
        thinks = None if thinking is None else thinking.type != "disabled"
        given: Json = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.to_chat() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.to_chat(),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "enable_thinking": thinks,
            "reasoning_effort": output.effort,
            "response_format": chat_format(output.format),
            "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
        }
        return ChatCompletionRequest(**given, **own)


class MessagesRequest(CountTokensRequest, ClientRequest):
    """Body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: Words = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    ignored: ClassVar[Ignored] = {
        **CountTokensRequest.ignored,
        "container": (),
        "inference_geo": (),
        "service_tier": ("auto", "standard_only"),
    }

    def to_chat(self, **own: Any) -> ChatCompletionRequest:
        """The chat request that has the same answer."""
        return super().to_chat(
            stream=self.stream,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            **own,
        )


# Answers of `/v1/messages`: one object, or the events that build it.


STOP_REASONS: Mapping[str, str] = {"length": "max_tokens"}
SIGNATURE = "unsigned"  # clients send it back; some leave reasoning without one out
# By block: its beginning, and the type and the key of its deltas.
EMPTY: Mapping[Kind, Json] = {
    REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    TEXT: {"type": "text", "text": ""},
    CALL: {"type": "tool_use"},
}
DELTAS: Mapping[Kind, tuple[str, str]] = {
    REASONING: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer(BlockAnswer):
    """The answer to one request."""

    def __init__(
        self, body: MessagesRequest, tokenizer: Tokenizer, parsed: ParsedText | None
    ) -> None:
        super().__init__(tokenizer, parsed)
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }

    def _object(self, results: Sequence[RequestOutput]) -> Json:
        content = [_content(block) for block in self._blocks.all]
        return {
            **self._head,
            "content": content,
            **self._stop(results),
            "usage": self._usage(results),
        }

    def _stop(self, results: Sequence[RequestOutput]) -> Json:
        output = results[0].outputs[0]
        reason, stop = STOP_REASONS.get(str(output.finish_reason), "end_turn"), output.stop_reason
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "end_turn" and any(block.kind == CALL for block in self._blocks.all):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, results: Sequence[RequestOutput]) -> Json:
        usage = usage_of(results)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic's leave them out
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._num_reasoning_tokens(results)},
        }

    def _begun(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        stop = {"stop_reason": None, "stop_sequence": None}
        begun = {**self._head, "content": list[Json](), **stop, "usage": self._usage(results)}
        yield named_event("message_start", message=begun)
        yield named_event("ping")

    def _events(self, step: Step) -> Iterator[bytes]:
        block = step.block
        event = partial(_block_event, block.index)
        if step.kind == "open":
            yield event(
                "content_block_start", content_block={**EMPTY[block.kind], **_called(block)}
            )
        elif step.kind == "grow":
            kind, key = DELTAS[block.kind]
            yield event("content_block_delta", delta={"type": kind, key: step.text})
        else:
            if block.kind == REASONING:
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                yield event("content_block_delta", delta=signature)
            yield event("content_block_stop")

    def _ended(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        yield named_event("message_delta", delta=self._stop(results), usage=self._usage(results))
        yield named_event("message_stop")

    def _failed(self, refusal: RequestRefused) -> bytes:
        return named_event("error", error=messages_error(refusal.status, refusal.body)["error"])


def _block_event(index: int, kind: str, **fields: Any) -> bytes:
    return named_event(kind, index=index, **fields)


def _called(block: Block) -> Json:
    """What only calls have."""
    if block.kind != CALL:
        return {}
    return {"id": block.call_id, "name": block.name, "input": {}}


def _content(block: Block) -> Json:
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    return {**EMPTY[CALL], **_called(block), "input": _input(block.text)}


def _input(arguments: str) -> Json:
    """The arguments of a call, which may be cut, or those of a model that has written no object, or
    what an answer cannot repeat."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
        encode_compact(found).encode()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
