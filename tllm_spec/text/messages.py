"""Messages of a conversation as Python callers give them, in the form that chat templates read; and
what the model's chat template leaves out of them.

A template is a program, so the check is to run it on messages and tools whose texts are marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

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


Tools = Sequence[Mapping[str, Any]] | None
Rendered = Callable[[Messages, Tools], str]
Change = Callable[[Messages], Messages]


class TemplateOverLimit(ValueError):
    """A chat template made too much."""


class Visible(NamedTuple):
    """The messages in the form that the template shows. has_tools, has_names: False if there are
    tools, or names of messages, and the template leaves one out."""

    messages: Messages
    has_tools: bool = True
    has_names: bool = True


def visible(messages: Messages, tools: Tools, rendered: Rendered) -> Visible:
    """rendered: runs the template, and raises ValueError for messages that it does not accept.
    Raises ValueError for a message that it leaves out in all forms."""
    marked = [_marked(index, message) for index, message in enumerate(messages)]
    marked_tools = [
        {**tool, "function": {**tool["function"], "name": _mark("t", index)}}
        if _has_name(tool)
        else tool
        for index, tool in enumerate(tools or ())
    ]
    tried: list[Messages] = []
    lost: list[tuple[int, str]] = []

    def text_of(form: Change) -> str | None:
        """None if the template does not accept the form, or leaves a message out."""
        tried.append(form(marked))
        try:
            text = rendered(tried[-1], marked_tools)
        except TemplateOverLimit:
            raise  # it would be over the limit with others, too
        except ValueError:
            return None
        missing = [own for own in enumerate(messages) if any(_missing(*own, text))]
        lost.extend((index, next(_missing(index, each, text))) for index, each in missing[:1])
        return None if missing else text

    for form in _forms():
        if form(marked) in tried or (text := text_of(form)) is None:
            continue
        if "None" in text and _no_none(tried[-1]) != tried[-1]:  # maybe for a content
            with_text = partial(_changed, (form, _no_none))
            if (other := text_of(with_text)) is not None:
                form, text = with_text, other
        return Visible(
            form(messages),
            all(_mark("t", i) in text for i, tool in enumerate(tools or ()) if _has_name(tool)),
            all(_mark("n", i) in text for i, each in enumerate(messages) if each.get("name")),
        )
    if not lost:
        return Visible(messages)
    index, what = lost[-1]
    raise ValueError(
        f"messages[{index}] has role = {messages[index]['role']!r}, and the model's chat template "
        f"leaves out {what} of such a message here"
    )


def _forms() -> Iterator[Change]:
    """Forms of the same messages that templates know, the usual one first."""
    for changes in product((None, _json_arguments), (None, _no_none), (None, _as_system)):
        yield partial(_changed, changes)
    for roles in (None, _as_system):
        yield partial(_changed, (_calls_as_text, roles))


def _changed(changes: Sequence[Change | None], messages: Messages) -> Messages:
    for change in changes:
        messages = messages if change is None else change(messages)
    return messages


def _as_system(messages: Messages) -> Messages:
    """The older name of a developer's role."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def _no_none(messages: Messages) -> Messages:
    """Next to calls there may be no content. Some templates ask whether it is None, others need a
    text."""
    return [
        {**message, "content": ""} if message["content"] is None else message
        for message in messages
    ]


def _json_arguments(messages: Messages) -> Messages:
    """For templates that write the arguments of a call as they are."""
    return [
        {**message, "tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_json(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return call
    return {
        **call,
        "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _calls_as_text(messages: Messages) -> Messages:
    """For templates that know no calls: each one is a line of the content, as a JSON object, and
    what tools answer is the user's."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    found: list[Mapping[str, Any]] = []
    follows_tool = False
    for message in messages:
        is_tool, own = message["role"] == "tool", dict(message)
        calls = own.pop("tool_calls", None) or ()
        functions = [call["function"] for call in calls]
        plain = [{name: each[name] for name in ("name", "arguments")} for each in functions]
        lines = [json.dumps(each, ensure_ascii=False) for each in plain]
        own["content"] = "\n".join([*([own["content"]] if own["content"] else []), *lines])
        if is_tool:
            own = {"role": "user", "content": own["content"]}
        if follows_tool and own["role"] == "user":  # many templates want turns to alternate
            found[-1] = {**own, "content": f"{found[-1]['content']}\n{own['content']}"}
        else:
            found.append(own)
        follows_tool = is_tool
    return found


def _missing(index: int, message: Mapping[str, Any], text: str) -> Iterator[str]:
    """What a template's text leaves out of a message. Templates may leave out the text next to
    calls, as Llama's do."""
    calls = message.get("tool_calls") or ()
    if message.get("content") and not calls and _mark("z", index) not in text:
        yield "the content"
    if any(_mark("z", index, number) not in text for number in range(len(calls))):
        yield "tool_calls"


def _marked(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    marked = dict(message)
    if message.get("content"):
        marked["content"] = _mark("z", index)
    if message.get("name"):
        marked["name"] = _mark("n", index)
    if calls := message.get("tool_calls"):
        marks = [_mark("z", index, number) for number in range(len(calls))]
        marked["tool_calls"] = [
            # A model may have written arguments that are no object.
            {**call, "function": {"name": mark, "arguments": mark if is_text else {mark: mark}}}
            for call, mark in zip(calls, marks, strict=True)
            for is_text in [isinstance(call["function"]["arguments"], str)]
        ]
    return marked


def _has_name(tool: object) -> bool:
    """Whether it has the form that is checked; templates may take others."""
    return isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)


def _mark(kind: str, *numbers: int) -> str:
    """kind: z of texts and calls, n of names, t of tools."""
    return f"q{kind}{'y'.join(map(str, numbers))}{kind}q"
