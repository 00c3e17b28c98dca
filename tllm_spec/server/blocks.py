"""An answer with one sample as blocks: reasoning, texts and calls, in the order of the text.

`/v1/responses` and `/v1/messages` send the same blocks. Each has its own form of a block and of the
events that open it, make it grow and close it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tllm_spec.chat_formats.pieces import ARGUMENTS, CALL, CONTENT
from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.server.answers import Json, encode
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.chat_answer import ParsedText, chat_usage
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.tokenizer import Tokenizer


@dataclass
class Block:
    """kind: REASONING, CONTENT or CALL. call_id, name: of a call. is_cut: the answer reached its
    limit in this block."""

    kind: str
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


# What a delta does to a block: open, grow or close; and the text by which it grows.
Step = tuple[str, Block, str]


class BlockAnswer(ABC):
    """The answer to one request. parsed: finds reasoning and calls in the text. `blocks` has those
    so far, at least one at the end."""

    def __init__(self, tokenizer: Tokenizer, parsed: ParsedText) -> None:
        self._tokenizer, self._parsed = tokenizer, parsed
        self.chunk_usage: Json = {}  # the usage has places of its own
        self.blocks: list[Block] = []
        self._num_read = 0  # characters of the output
        self._blank = ""  # white space that is a text's beginning or separates two other blocks

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        """As `Answer.is_slow`."""
        return len(results[0].outputs[0].text) > LONG_BODY

    def starts_slowly(self, prompt_index: int, result: RequestOutput) -> bool:
        """As `Answer.starts_slowly`."""
        return False

    def whole(self, results: Sequence[RequestOutput]) -> Json:
        """The answer without streaming."""
        for _ in self.read(results[0].outputs[0]):
            pass
        return self._object(results)

    def events(self, prompt_index: int, result: RequestOutput, counts: Json | None = None) -> bytes:
        """Those of the new part of the result."""
        steps = self.read(result.outputs[0])
        return b"".join(event for step in steps for event in self._step(*step))

    def usage(self, results: Sequence[RequestOutput]) -> Json:
        """That of a chat's answer."""
        return chat_usage(self._tokenizer, [self._parsed], results)

    def read(self, output: CompletionOutput) -> Iterator[Step]:
        """What the new part of the output does."""
        new = output.text[self._num_read :]
        self._num_read += len(new)
        for kind, text, _, call_id in self._parsed.parts(new, output):
            if kind == CALL:
                yield from self._opened(Block(CALL, len(self.blocks), call_id, text))
            elif kind == CONTENT:
                yield from self._texted(text)
            else:
                yield from self._grown(CALL if kind == ARGUMENTS else kind, text)
        if output.finish_reason is not None:
            if not self.blocks:
                yield from self._opened(Block(CONTENT, 0))
                yield from self._grown(CONTENT, self._blank)
            self.blocks[-1].is_cut = output.finish_reason == "length"
            yield "close", self.blocks[-1], ""

    def _texted(self, text: str) -> Iterator[Step]:
        if not (self.blocks and self.blocks[-1].kind == CONTENT):
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
        yield from self._grown(CONTENT, text)

    def _opened(self, block: Block) -> Iterator[Step]:
        if self.blocks:
            self._blank = ""
            yield "close", self.blocks[-1], ""
        self.blocks.append(block)
        yield "open", block, ""

    def _grown(self, kind: str, text: str) -> Iterator[Step]:
        if not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._opened(Block(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.pieces.append(text)
        yield "grow", block, text

    @abstractmethod
    def _object(self, results: Sequence[RequestOutput]) -> Json:
        """The finished answer."""

    @abstractmethod
    def begun(self, results: Sequence[RequestOutput]) -> bytes:
        """The events before the first block."""

    @abstractmethod
    def _step(self, kind: str, block: Block, text: str) -> Iterator[bytes]:
        """The events of one step."""

    @abstractmethod
    def ended(self, results: Sequence[RequestOutput]) -> bytes:
        """The events after the last block."""

    @abstractmethod
    def failed(self, refusal: RequestRefused) -> bytes:
        """The event that ends a stream whose request has failed."""


def named_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event whose data has its name as `type`."""
    return f"event: {kind}\ndata: {encode({'type': kind, **fields})}\n\n".encode()
