"""The body of OpenAI's `/v1/responses`, reduced to what a chat request can say: text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from tllm_spec.config.config_base import ConfigError
from tllm_spec.config.neighbours import Ignored
from tllm_spec.config.option_checks import MAX_UNKNOWN, shown
from tllm_spec.server.chat_message import ChatMessage
from tllm_spec.server.protocol import NOT_STORED, ChatCompletionRequest
from tllm_spec.server.strict_body import BodyModel, CacheSalt, as_json_type

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


class ResponsesRequest(BodyModel):
    """Body of `/v1/responses`."""

    model: str
    input: Annotated[
        str | list[InputItem], BeforeValidator(_as_items), as_json_type(str | list[dict[str, Any]])
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_check_plain)] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: CacheSalt = None
    store: bool | None = None

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
