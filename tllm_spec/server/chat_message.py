"""A message of a conversation, as chat bodies have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict

from tllm_spec.config.config_base import check
from tllm_spec.config.neighbours import Ignored
from tllm_spec.server.body_model import BodyModel, as_json_type
from tllm_spec.server.tool_protocol import ToolCall

OLD_TOOLS = "use tools, which replace it"
# Other fields of OpenAI's answers: clients send them back with the conversation.
MESSAGE_IGNORED: Ignored = {
    # Older clients and those of /v1/responses send it.
    "type": ("text", "message"),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


class TextPart(BodyModel):
    """A part of a message. cache_control has no effect: prefixes are always cached."""

    type: Literal["text"] = "text"
    text: str
    cache_control: dict[str, Any] | None = None


def _join_text_parts(content: object) -> object:
    """The text of a message; a list of text parts is joined."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(
                'parts have the form {"type": "text", "text": "..."}; only text is served'
            )
    return "".join(TextPart(**part).text for part in content)


class ChatMessage(BodyModel):
    """One message. `name` is passed to the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["content"]},
                {"properties": {"role": {"const": "assistant"}}},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None,
        BeforeValidator(_join_text_parts),
        as_json_type(str | list[dict[str, str]] | None),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    ignored: ClassVar[Ignored] = MESSAGE_IGNORED

    @check
    def _check_content(self) -> Iterator[str]:
        if self.tool_calls and self.role != "assistant":
            yield f"role = {self.role!r}: only an assistant's message has tool_calls"
        # An answer may have reasoning or calls only, or nothing.
        if self.content is None and self.role != "assistant":
            yield "content is required"

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: arguments of calls are objects, not text."""
        plain = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template() for call in self.tool_calls]
            plain.setdefault("content", None)
        return plain
