"""Llama's calls: the whole text is calls, as JSON or as a Python list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

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
from tllm_spec.chat_formats.pieces import Arguments, CallStart, JsonCall, Piece, Text
from tllm_spec.chat_formats.schema_values import alone, properties_of

PYTHON_TAG = "<|python_tag|>"
PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
# json's names, which models write in Python, too
CONSTANTS = {"true": True, "false": False, "null": None}
MAX_CALLS_CHARS = 1 << 16


class LlamaJsonCalls:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, maybe after
    <|python_tag|>. Any other beginning makes the whole text an answer."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._buffer = ""
        self._is_text = False
        self._call: JsonCall | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Text(text)]
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer:
            if self._call is None and not self._begin():
                break
            if self._call is None:  # it is a text
                pieces.append(Text(self._buffer))
                self._buffer = ""
                break
            new, self._buffer = self._call.feed(self._buffer)
            pieces += new
            if not self._call.is_done:
                break
            pieces += self._ended()
        return pieces

    def finish(self) -> list[Piece]:
        call, self._call = self._call, None
        raw = "" if call is None or call.has_started else call.raw
        rest, self._buffer = raw + self._buffer, ""
        return [Text(rest)] if rest.strip(" \t\r\n;") else []

    def _begin(self) -> bool:
        """Whether it is known what follows: a call, or a text."""
        if self._is_text:
            return True
        begun = self._buffer.lstrip(" \t\r\n;")
        if begun.startswith("{"):
            self._call, self._buffer = JsonCall(), begun
        elif begun.startswith(PYTHON_TAG):
            self._buffer = begun[len(PYTHON_TAG) :]
            return self._begin()
        elif PYTHON_TAG.startswith(begun):
            return False
        else:
            self._is_text = True
        return True

    def _ended(self) -> list[Piece]:
        call, self._call = self._call, None
        assert call is not None
        if call.has_started:
            return []
        self._is_text = True
        return [Text(call.raw)]


class PythonicCalls:
    """`[f(a=1), g(b="x")]`. Calls are given out one by one, each as a whole."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._buffer = ""
        self._position = 0  # up to which the buffer was read
        self._begin = 0  # of the present call in the buffer
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._is_text = self._is_done = self._has_call = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Text(text)]
        if self._is_done:
            return []
        self._buffer += text
        if not self._has_begun():
            return self._as_text() if self._is_text else []
        pieces: list[Piece] = []
        while self._position < len(self._buffer) and not (self._is_done or self._is_text):
            character = self._buffer[self._position]
            self._position += 1
            pieces += self._read(character)
        if len(self._buffer) > MAX_CALLS_CHARS and not self._has_call:
            self._is_text = True
        return pieces + (self._as_text() if self._is_text else [])

    def finish(self) -> list[Piece]:
        if self._is_text or self._has_call or not self._buffer.strip():
            return []
        return self._as_text()

    def _as_text(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        return [Text(rest)] if rest else []

    def _has_begun(self) -> bool:
        if self._depth:
            return True
        begun = self._buffer.lstrip()
        start = PYTHON_MARKS[0]
        if begun.startswith(start):
            begun = begun[len(start) :].lstrip()
        elif begun and start.startswith(begun):
            return False
        if not begun:
            return False
        if not re.match(r"\[\s*(?:[A-Za-z_].*)?\Z", begun, re.DOTALL):
            self._is_text = True
            return False
        self._position = self._begin = len(self._buffer) - len(begun) + 1
        self._depth = 1
        return True

    def _read(self, character: str) -> list[Piece]:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if self._depth == 1 and character == ")":
                return self._called()
            self._is_done = self._depth == 0
            self._is_text = self._is_done and not self._has_call
        return []

    def _called(self) -> list[Piece]:
        source = self._buffer[self._begin : self._position].strip(", \t\r\n")
        self._begin = self._position
        call = python_call(source)
        if call is None:
            if self._has_call:
                self._is_done = True  # what follows a call has no place in an answer
            else:
                self._is_text = True
            return []
        self._has_call = True
        return [CallStart(call[0]), Arguments(json.dumps(call[1], ensure_ascii=False))]


def python_call(source: str) -> tuple[str, dict[str, Any]] | None:
    """Name and keyword arguments of a call with literals; None for anything else."""
    try:
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {str(word.arg): _literal(word.value) for word in node.keywords}
        json.dumps(arguments, allow_nan=False)
        return ast.unparse(node.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("** has no JSON form")
        return {
            str(_literal(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


def _json(function: Function) -> Part:
    return json_call(function.name, function.parameters, "parameters")


def _python(function: Function) -> Part:
    """A call with keyword arguments in JSON. Raises ValueError for a name that Python does not
    have."""
    root = function.parameters
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
    LlamaJsonCalls,
    _json,
    separator=";",
    tokens=(PYTHON_TAG,),
    template=(PYTHON_TAG,),
    lone_calls="{",
)
PYTHONIC = ChatFormat(
    PythonicCalls,
    _python,
    begin="[",
    end="]",
    separator=",",
    tokens=PYTHON_MARKS,
    template=PYTHON_MARKS[:1],
    lone_calls=r"\[",
)
