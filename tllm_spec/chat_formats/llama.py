"""Llama's calls: the whole text is calls, as JSON or as a Python list."""

from __future__ import annotations

import ast
import json
import re
from functools import partial
from keyword import iskeyword

from tllm_spec.chat_formats.chat_format import (
    WHITESPACE,
    ChatFormat,
    Function,
    Part,
    json_call,
    json_part,
    members,
    sequence,
    text,
)
from tllm_spec.chat_formats.pieces import (
    CONTENT,
    JsonEnd,
    Piece,
    StepParser,
    Steps,
    Text,
    whole_call,
)
from tllm_spec.chat_formats.schema_values import alone, properties_of, with_root

PYTHON_TAG = "<|python_tag|>"
PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
CONSTANTS = {"true": True, "false": False, "null": None}
SEPARATORS = " \t\r\n;"
MAX_CALLS_CHARS = 1 << 16
MAY_BE_CALL = re.compile(r"[,\s]*(?:[A-Za-z_]|$)")


class LlamaJsonCalls(StepParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, maybe after
    <|python_tag|>. Any other beginning makes the whole text an answer."""

    def steps(self) -> Steps[None]:
        text = ""
        while not text:
            while (yield from self.marker(PYTHON_TAG, SEPARATORS)):
                continue
            if not (begun := self.text.lstrip(SEPARATORS)).startswith("{"):
                break
            self.text = begun
            text = yield from self.json_call()
        if text or begun:
            yield Text(text)
            yield from self.rest(CONTENT)


class PythonEnd(JsonEnd):
    """Finds the end of a call."""

    opening, closing, quotes = "([{", ")]}", "\"'"


class PythonicCalls(StepParser):
    """`[f(a=1), g(b="x")]`. Calls are given out one by one, each as a whole. What follows them has
    no place in an answer."""

    def steps(self) -> Steps[None]:
        yield from self.marker(PYTHON_MARKS[0])
        read, has_call = "", False
        if (yield from self.marker("[")):
            read = "["
            while call := python_call(source := (yield from self._next(has_call=has_call))):
                has_call = True
                yield from call
            read += source
        if not has_call:
            yield Text(read)
            yield from self.rest(CONTENT)
        while not self.has_ended:
            self.taken()
            yield None

    def _next(self, *, has_call: bool) -> Steps[str]:
        """The text up to a closing bracket; empty if there is no call."""
        end, num_read = PythonEnd(), 0
        while (length := end.feed(self.text[num_read:])) is None:
            num_read = len(self.text)
            is_long = num_read > MAX_CALLS_CHARS and not has_call
            if self.has_ended or is_long or not MAY_BE_CALL.match(self.text):
                return ""
            yield None
        return self.taken(num_read + length)


def python_call(source: str) -> tuple[Piece, Piece] | None:
    """A call with literals as keyword arguments; None for anything else."""
    try:
        node = _JsonNames().visit(ast.parse(source.strip(", \t\r\n"), mode="eval")).body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return whole_call(ast.unparse(node.func), written)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """Replaces json's names, which models write in Python, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


def _python(function: Function) -> Part:
    """A call with keyword arguments in JSON. Raises ValueError for a name that Python does not
    have."""
    root = with_root(function.parameters)
    properties = properties_of(root, root)
    for name in (*function.name.split("."), *properties):
        if not name.isidentifier() or iskeyword(name):
            raise ValueError(f"{name!r} in tools is no name of Python, in which calls are written")
    pairs = [
        (sequence(text(f"{name}="), json_part(alone(schema, root))), is_needed)
        for name, (schema, is_needed) in properties.items()
    ]
    comma = sequence(text(","), WHITESPACE)
    return sequence(text(f"{function.name}("), members(pairs, comma), text(")"))


LLAMA_JSON = ChatFormat(
    lambda functions: LlamaJsonCalls(),
    partial(json_call, arguments_key="parameters"),
    separator=";",
    tokens=(PYTHON_TAG,),
    template=(PYTHON_TAG,),
    lone_calls="{",
)
PYTHONIC = ChatFormat(
    lambda functions: PythonicCalls(),
    _python,
    begin="[",
    end="]",
    separator=",",
    tokens=PYTHON_MARKS,
    template=PYTHON_MARKS[:1],
    lone_calls=r"\[",
)
