"""Messages that the model's chat template leaves out are refused: the model would not see them.

A template is a program, so the check is to run it on messages whose texts are marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tllm_spec.text.messages import Messages
from tllm_spec.text.template_process import TemplateOverLimit

Rendered = Callable[[Messages], str]
UNKNOWN = (-1, "")  # the template does not accept marks


def visible(messages: Messages, rendered: Rendered) -> Messages:
    """The messages in the form that the template shows: a developer's may have to be the system's,
    which is the older name of the role. rendered: runs the template, and raises ValueError for
    messages that it does not accept. Raises ValueError for a message that it leaves out."""
    lost = _lost(messages, rendered)
    if lost is not None and any(message["role"] == "developer" for message in messages):
        messages = [
            message | {"role": "system"} if message["role"] == "developer" else message
            for message in map(dict, messages)
        ]
        lost = _lost(messages, rendered)
    if lost is None or lost == UNKNOWN:
        return messages
    index, what = lost
    raise ValueError(
        f"messages[{index}] has role = {messages[index]['role']!r}, and the model's chat template "
        f"leaves out {what} of such a message here"
    )


def _lost(messages: Messages, rendered: Rendered) -> tuple[int, str] | None:
    """The first message that is left out, and what of it; `UNKNOWN` if the template does not accept
    the marks."""
    try:
        text = rendered([_marked(index, message) for index, message in enumerate(messages)])
    except TemplateOverLimit:
        raise  # it would be over the limit with the messages, too
    except ValueError:
        return UNKNOWN
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
    if calls := message.get("tool_calls"):
        marks = [_mark(index, number) for number in range(len(calls))]
        marked["tool_calls"] = [
            call | {"function": {"name": mark, "arguments": {mark: mark}}}
            for call, mark in zip(calls, marks, strict=True)
        ]
    return marked


def _mark(index: int, call: int | None = None) -> str:
    return f"qz{index}" + ("" if call is None else f"y{call}") + "zq"
