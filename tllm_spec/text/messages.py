"""Messages of a conversation as Python callers give them, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from tllm_spec.config.option_checks import shown

Messages = Sequence[Mapping[str, Any]]


def checked(messages: Any) -> Messages:
    """The messages, with a text for each list of text parts and an object for the arguments of each
    call; without names that have no value. An answer may have no content. Raises ValueError for
    what is not a message."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ValueError(
            f"messages = {shown(messages)}: a list with at least one message is needed"
        )
    return [_checked(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _checked(name: str, message: object) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        form = 'a mapping like {"role": "user", "content": "..."} is needed'
        raise ValueError(f"{name} = {shown(message)}: {form}")
    calls, is_answer = message.get("tool_calls") or (), message["role"] == "assistant"
    content = _text(f"{name}['content']", message.get("content"), may_be_none=is_answer)
    # Templates ask for the names: null, and no call, mean that there is nothing.
    plain = {each: value for each, value in message.items() if value is not None}
    plain.pop("tool_calls", None)
    plain["content"] = "" if content is None and not calls else content
    if calls:
        plain["tool_calls"] = [_call(f"{name}['tool_calls']", call) for call in calls]
    return plain


def _text(name: str, content: object, *, may_be_none: bool) -> str | None:
    if isinstance(content, str) or (content is None and may_be_none):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{name} = {shown(content)}: text, or a list of text parts, is needed")
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            form = '{"type": "text", "text": "..."}'
            raise ValueError(f"{name}: parts have the form {form}; only text is served")
    return "".join(part["text"] for part in content)


def _call(name: str, call: object) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        form = '{"function": {"name": "...", "arguments": {...}}}'
        raise ValueError(f"{name}: a call like {form} is needed")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = as_object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}  # type: ignore[dict-item]


def as_object(arguments: str) -> dict[str, Any] | str:
    """The arguments of a model's call: an object if the text is one, or the beginning of one, as in
    a call that `max_tokens` has cut; else the text."""
    try:
        # Not json.loads: it reads no beginning of a text.
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments
