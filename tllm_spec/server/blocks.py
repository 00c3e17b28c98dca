"""An answer with one sample as blocks: reasoning, texts and calls, in the order of the text.

`/v1/responses` and `/v1/messages` send the same blocks. Each has its own form of a block and of the
events that open it, make it grow and close it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.server.answers import Json, encode, num_reasoning_tokens
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.server.streaming import Running
from tllm_spec.text.tokenizer import Tokenizer

Kind = Literal["reasoning_content", "content", "tool_calls"]
# As the parts of a message's delta are called.
REASONING: Kind = "reasoning_content"
TEXT: Kind = "content"
CALL: Kind = "tool_calls"


@dataclass
class Block:
    """call_id, name: of a call. is_cut: the answer reached its limit in this block."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """What a delta does to a block. text: by which it grows."""

    kind: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """parsed: finds reasoning and calls in the text; None: the text is the answer. `all` has the
    blocks so far, at least one at the end."""

    def __init__(self, parsed: ParsedText | None) -> None:
        self._parsed = parsed
        self._num_read = 0  # characters of the output
        self._blank = ""  # white space that is a text's beginning or separates two other blocks
        self._has_ended = False
        self.all: list[Block] = []

    @property
    def is_parsed(self) -> bool:
        return self._parsed is not None

    def read(self, output: CompletionOutput) -> Iterator[Step]:
        """What the new part of the output does."""
        new = output.text[self._num_read :]
        self._num_read += len(new)
        if self._parsed is None:
            yield from self._texted(new)
        else:
            for piece in self._parsed.pieces(new, output):
                delta = self._parsed.delta([piece])
                for call in delta.get(CALL, ()):
                    yield from self._called(call)
                yield from self._grown(REASONING, delta.get(REASONING, ""))
                yield from self._texted(delta.get(TEXT, ""))
        if output.finish_reason is not None and not self._has_ended:
            self._has_ended = True
            if not self.all:
                yield from self._opened(Block(TEXT, 0))
                yield from self._grown(TEXT, self._blank)
            self.all[-1].is_cut = output.finish_reason == "length"
            yield Step("close", self.all[-1])

    def _called(self, call: Json) -> Iterator[Step]:
        function = call["function"]
        if "name" in function:
            block = Block(CALL, len(self.all), call["id"], function["name"])
            yield from self._opened(block)
        yield from self._grown(CALL, function["arguments"])

    def _texted(self, text: str) -> Iterator[Step]:
        if not (self.all and self.all[-1].kind == TEXT):
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
        yield from self._grown(TEXT, text)

    def _opened(self, block: Block) -> Iterator[Step]:
        if self.all:
            self._blank = ""
            yield Step("close", self.all[-1])
        self.all.append(block)
        yield Step("open", block)

    def _grown(self, kind: Kind, text: str) -> Iterator[Step]:
        if not text:
            return
        if not self.all or self.all[-1].kind != kind:
            yield from self._opened(Block(kind, len(self.all)))
        block = self.all[-1]
        block.pieces.append(text)
        yield Step("grow", block, text)


InThread = Callable[[Callable[[], bytes]], Awaitable[bytes]]


class BlockAnswer(ABC):
    """The answer to one request. tokenizer: counts the tokens of the reasoning."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedText | None) -> None:
        self._tokenizer, self._blocks = tokenizer, Blocks(parsed)

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        """As `Answer.is_slow`."""
        return self._blocks.is_parsed and len(results[0].outputs[0].text) > LONG_BODY

    def whole(self, results: Sequence[RequestOutput]) -> Json:
        """The answer without streaming."""
        for _ in self._blocks.read(results[0].outputs[0]):
            pass
        return self._object(results)

    async def events(self, running: Running, in_thread: InThread) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. A request that fails ends with an error event.
        in_thread: does work that takes long."""
        handles = running.handles
        yield b"".join(self._begun(handles))
        async with aclosing(running.updates()) as updates:
            try:
                async for _, result in updates:
                    steps = self._blocks.read(result.outputs[0])
                    if data := b"".join(each for step in steps for each in self._events(step)):
                        yield data
            except RequestRefused as refusal:
                yield self._failed(refusal)
                return

        def end() -> bytes:
            return b"".join(self._ended(handles))

        yield await in_thread(end) if self.is_slow(handles) else end()

    def _num_reasoning_tokens(self, results: Sequence[RequestOutput]) -> int:
        texts = [block.text for block in self._blocks.all if block.kind == REASONING]
        return num_reasoning_tokens(self._tokenizer, ["".join(texts)], results)

    @abstractmethod
    def _object(self, results: Sequence[RequestOutput]) -> Json:
        """The finished answer."""

    @abstractmethod
    def _begun(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        """The events before the first block."""

    @abstractmethod
    def _events(self, step: Step) -> Iterator[bytes]:
        """The events of one step."""

    @abstractmethod
    def _ended(self, results: Sequence[RequestOutput]) -> Iterator[bytes]:
        """The events after the last block."""

    @abstractmethod
    def _failed(self, refusal: RequestRefused) -> bytes:
        """The event that ends a stream whose request has failed."""


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose data has its name as `type`."""
    return f"event: {kind}\ndata: {encode({'type': kind, **fields})}\n\n".encode()


# Requests with such blocks, reduced to what a chat request can say.


def chat_choice(name: str) -> Json:
    """`tool_choice` of a chat request for one function."""
    return {"type": "function", "function": {"name": name}}


def chat_format(given: Json | None) -> Json | None:
    """`response_format` of a chat request, from a format whose schema is not nested."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": given}
