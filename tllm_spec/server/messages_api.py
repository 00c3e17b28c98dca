"""Anthropic's `/v1/messages`: its body, reduced to what a chat request can say, and its answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, Tag
from pydantic_core import from_json

from tllm_spec.chat_formats.pieces import CALL, CONTENT, REASONING
from tllm_spec.config.config_base import check
from tllm_spec.config.neighbours import Ignored
from tllm_spec.outputs import RequestOutput
from tllm_spec.server.answers import Json, encode_compact, weights_of
from tllm_spec.server.blocks import Block, BlockAnswer, named_event
from tllm_spec.server.bodies import BodyModel, as_json_type, by_type
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.chat_message import MAX_TOOLS, ChatMessage, Name, TextPart, ToolCall, text_of
from tllm_spec.server.protocol import ChatCompletionRequest, ClientRequest, ReasoningEffort, Words
from tllm_spec.server.refusals import RequestRefused
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
# Prefixes are always cached.
CACHE: Ignored = {"cache_control": (dict,)}
Text = Annotated[str, text_of("text", separator="\n"), as_json_type(str | list[dict[str, str]])]
TextBlock = Annotated[TextPart, Tag("text")]


class ToolResultBlock(BodyModel):
    """What a called tool has returned. is_error: it has failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text = ""
    is_error: bool = False

    ignored: ClassVar[Ignored] = CACHE


class ThinkingBlock(BodyModel):
    """Reasoning of an earlier answer. It is a text of the client: the signature proves nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    ignored: ClassVar[Ignored] = CACHE


class RedactedThinkingBlock(BodyModel):
    """Reasoning of another server that cannot be read, and is left out."""

    type: Literal["redacted_thinking"]
    data: str

    ignored: ClassVar[Ignored] = CACHE


class ToolUseBlock(BodyModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json

    ignored: ClassVar[Ignored] = {**CACHE, "caller": ({"type": "direct"},)}


UserBlock = Annotated[
    TextBlock | Annotated[ToolResultBlock, Tag("tool_result")],
    by_type("only text is served; blocks of this role have the types text and tool_result"),
]
AssistantBlock = Annotated[
    TextBlock
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    by_type("blocks of this role have the types text, tool_use, thinking and redacted_thinking"),
]


def _as_blocks(given: object) -> object:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


AS_BLOCKS = BeforeValidator(_as_blocks)
TEXT_OR_BLOCKS = as_json_type(str | list[dict[str, Any]])


class UserMessage(BodyModel):
    """A message that is no answer."""

    role: Literal["user", "system"]
    # FailFast: thousands of wrong blocks would take seconds to describe.
    content: Annotated[list[UserBlock], FailFast(), AS_BLOCKS, TEXT_OR_BLOCKS]

    def to_chat(self) -> Iterator[ChatMessage]:
        """The messages of a chat that say the same."""
        for _, group in groupby(self.content, type):
            blocks = list(group)
            texts = [each.text for each in blocks if isinstance(each, TextPart)]
            if texts:
                yield ChatMessage(role=self.role, content="\n".join(texts))
            for each in blocks:
                if isinstance(each, ToolResultBlock):
                    content = f"Error: {each.content}" if each.is_error else each.content
                    yield ChatMessage(role="tool", content=content, tool_call_id=each.tool_use_id)


class AssistantMessage(BodyModel):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Annotated[list[AssistantBlock], FailFast(), AS_BLOCKS, TEXT_OR_BLOCKS]

    def to_chat(self) -> Iterator[ChatMessage]:
        """The message of a chat that says the same."""
        thinking = [each.thinking for each in self.content if isinstance(each, ThinkingBlock)]
        texts = [each.text for each in self.content if isinstance(each, TextPart)]
        yield ChatMessage(
            role="assistant",
            reasoning_content="\n".join(thinking) or None,
            content="".join(texts) if texts else None,
            tool_calls=[
                ToolCall.of(each.id, each.name, json.dumps(each.input, ensure_ascii=False))
                for each in self.content
                if isinstance(each, ToolUseBlock)
            ],
        )


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
        own = self.model_dump(include={"name", "description", "strict"})
        return {"function": {**own, "parameters": self.input_schema}}


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
            return {"name": self.name}
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

    effort: ReasoningEffort | None = None
    format: Json | None = None


class MessagesRequest(ClientRequest):
    """Body of `/v1/messages`."""

    messages: Annotated[
        list[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]],
        Field(min_length=1),
        FailFast(),
    ]
    max_tokens: int
    system: Text | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Words = None
    top_k: int | None = None

    ignored: ClassVar[Ignored] = {
        **CACHE,
        "container": (),
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }

    @check
    def _check_end(self) -> Iterator[str]:
        if self.messages[-1].role == "assistant":
            yield "messages ends with the assistant's: the beginning of an answer is not continued"

    def to_chat(self) -> ChatCompletionRequest:
        """The chat request that has the same answer."""
        messages = [each for message in self.messages for each in message.to_chat()]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=self.system))
        choice, thinking, output = self.tool_choice, self.thinking, self.output_config
        return self.as_chat(
            messages=messages,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            top_k=self.top_k,
            response_format=output and output.format,
            reasoning_effort=output and output.effort,
            enable_thinking=thinking and thinking.type != "disabled",
            thinking_token_budget=thinking and thinking.budget_tokens,
            tools=[tool.to_chat() for tool in self.tools or ()],
            tool_choice=choice and choice.to_chat(),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        )


class CountTokensRequest(MessagesRequest):
    """Body of `/v1/messages/count_tokens`, which has no answer to limit."""

    max_tokens: int = 1


# Answers of `/v1/messages`: one object, or the events that build it.


SIGNATURE = "unsigned"  # clients send it back; some leave reasoning without one out
# The type and the key of a block's deltas.
DELTAS: Mapping[str, tuple[str, str]] = {
    REASONING: ("thinking_delta", "thinking"),
    CONTENT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer(BlockAnswer):
    """The answer to one request."""

    def __init__(self, body: MessagesRequest, tokenizer: Tokenizer, parsed: ParsedText) -> None:
        super().__init__(tokenizer, parsed)
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }

    def _object(self, results: Sequence[RequestOutput]) -> Json:
        content = [_block(block, SIGNATURE) for block in self.blocks]
        return {**self._head, "content": content, **self._end(results)} | self._usage(results)

    def _end(self, results: Sequence[RequestOutput]) -> Json:
        output = results[0].outputs[0]
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = "end_turn" if stop is None else "stop_sequence"
        if output.finish_reason == "length":
            reason = "max_tokens"
        elif stop is None and any(block.kind == CALL for block in self.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, results: Sequence[RequestOutput]) -> Json:
        usage = self.usage(results)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        details = usage["completion_tokens_details"]
        return {
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,  # Anthropic's leave them out
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": details["reasoning_tokens"]},
            },
            **weights_of(results[0].outputs[0]),
        }

    def begun(self, results: Sequence[RequestOutput]) -> bytes:
        begun: Json = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        start = named_event("message_start", message=begun | self._usage(results))
        return start + named_event("ping")

    def _step(self, kind: str, block: Block, text: str) -> Iterator[bytes]:
        at = {"index": block.index}
        if kind == "open":
            yield named_event("content_block_start", **at, content_block=_block(block, ""))
        elif kind == "grow":
            name, key = DELTAS[block.kind]
            yield named_event("content_block_delta", **at, delta={"type": name, key: text})
        else:
            if block.kind == REASONING:
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                yield named_event("content_block_delta", **at, delta=signature)
            yield named_event("content_block_stop", **at)

    def ended(self, results: Sequence[RequestOutput]) -> bytes:
        end = named_event("message_delta", delta=self._end(results), **self._usage(results))
        return end + named_event("message_stop")

    def failed(self, refusal: RequestRefused) -> bytes:
        return named_event("error", error=refusal.messages_body["error"])


def _block(block: Block, signature: str) -> Json:
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind == CONTENT:
        return {"type": "text", "text": block.text}
    called = {"id": block.call_id, "name": block.name, "input": _input(block.text)}
    return {"type": "tool_use", **called}


def _input(arguments: str) -> Json:
    """The arguments of a call, which may be cut, or those of a model that has written no object, or
    what an answer cannot repeat."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
        encode_compact(found).encode()
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
