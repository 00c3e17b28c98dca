"""What the model's chat template leaves out of a conversation: the model would not see it.

A template is a program, so the check is to run it on messages and tools whose texts are marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tllm_spec.text.messages import Messages

Tools = Sequence[Mapping[str, Any]] | None
Rendered = Callable[[Messages, Tools], str]


class TemplateOverLimit(ValueError):
    """A chat template made too much."""


class Visible(NamedTuple):
    """The messages in the form that the template shows. has_tools, has_names: False if there are
    tools, or names of messages, and the template leaves one out."""

    messages: Messages
    has_tools: bool = True
    has_names: bool = True


def visible(messages: Messages, tools: Tools, rendered: Rendered) -> Visible:
    """A developer's message may have to be the system's, which is the older name of the role.
    rendered: runs the template, and raises ValueError for messages that it does not accept. Raises
    ValueError for a message that it leaves out."""
    text = _with_marks(messages, tools, rendered)
    is_refused = text is None or _lost(messages, text) is not None
    if is_refused and any(message["role"] == "developer" for message in messages):
        messages = [
            message | {"role": "system"} if message["role"] == "developer" else message
            for message in map(dict, messages)
        ]
        text = _with_marks(messages, tools, rendered)
    if text is None:
        return Visible(messages)
    if (lost := _lost(messages, text)) is not None:
        index, what = lost
        raise ValueError(
            f"messages[{index}] has role = {messages[index]['role']!r}, and the model's chat "
            f"template leaves out {what} of such a message here"
        )
    return Visible(
        messages,
        all(_tool_mark(i) in text for i, tool in enumerate(tools or ()) if _has_name(tool)),
        all(_name_mark(i) in text for i, message in enumerate(messages) if message.get("name")),
    )


def _with_marks(messages: Messages, tools: Tools, rendered: Rendered) -> str | None:
    """The template's text; None if the template does not accept the marks."""
    marked = [_marked(index, message) for index, message in enumerate(messages)]
    try:
        return rendered(marked, [_marked_tool(*each) for each in enumerate(tools or ())])
    except TemplateOverLimit:
        raise  # it would be over the limit with the messages, too
    except ValueError:
        return None


def _lost(messages: Messages, text: str) -> tuple[int, str] | None:
    """The first message that is left out, and what of it."""
    for index, message in enumerate(messages):
        for what, mark in _marks(index, message):
            if mark not in text:
                return index, what
    return None


def _marks(index: int, message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What must be seen. Templates may leave out the text next to calls, as Llama's do."""
    calls = message.get("tool_calls") or ()
    if message.get("content") and not calls:
        yield "the content", _mark(index)
    for number in range(len(calls)):
        yield "tool_calls", _mark(index, number)


def _marked(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    marked = dict(message)
    if message.get("content"):
        marked["content"] = _mark(index)
    if message.get("name"):
        marked["name"] = _name_mark(index)
    if calls := message.get("tool_calls"):
        marks = [_mark(index, number) for number in range(len(calls))]
        marked["tool_calls"] = [
            call | {"function": {"name": mark, "arguments": {mark: mark}}}
            for call, mark in zip(calls, marks, strict=True)
        ]
    return marked


def _has_name(tool: object) -> bool:
    """Whether it has the form that is checked; templates may take others."""
    return isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)


def _marked_tool(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _has_name(tool):
        return tool
    return {**tool, "function": {**tool["function"], "name": _tool_mark(index)}}


def _mark(index: int, call: int | None = None) -> str:
    return f"qz{index}" + ("" if call is None else f"y{call}") + "zq"


def _name_mark(index: int) -> str:
    return f"qn{index}nq"


def _tool_mark(index: int) -> str:
    return f"qt{index}tq"
