"""Chat answers, whose text may have reasoning and calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tllm_spec.outputs import CompletionOutput, Logprob, RequestOutput
from tllm_spec.server.answers import Answer, Json, Logprobs, number_of
from tllm_spec.server.chat_message import NamedChoice
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.parsers.harmony import HarmonyParser, MarkedText
from tllm_spec.server.parsers.names import TOOL_PARSERS, PlainText, with_reasoning
from tllm_spec.server.parsers.pieces import (
    CALL,
    CONTENT,
    REASONING,
    ForcedCall,
    ForcedCalls,
    NewParser,
    Parser,
    Piece,
)
from tllm_spec.server.protocol import ChatCompletionRequest
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.tokenizer import REPLACEMENT, Tokenizer, bytes_of_token

NO_PARSER = (
    "tool_choice = 'auto' needs a server with --tool_call_parser; none, required and a function "
    "are served without"
)


def parser_of(
    body: ChatCompletionRequest, options: ServerOptions, *, is_guided: bool, is_harmony: bool
) -> NewParser | None:
    """None if the text is the answer. A grammar applies from the first token, so guided text has no
    reasoning. is_harmony: of the model, if no option names another format. Raises RequestRefused
    for tools without a parser."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        return lambda: ForcedCall(name)
    if choice == "required":
        return ForcedCalls
    if is_guided:
        return None
    if is_harmony:
        tools = () if choice == "none" else body.tools or ()
        functions = frozenset(tool.function.name for tool in tools)
        return lambda: HarmonyParser(functions)
    if choice == "none":
        if options.reasoning_parser is None:
            return None
        return with_reasoning(options.reasoning_parser, PlainText)
    if options.tool_call_parser is None:
        raise RequestRefused(400, NO_PARSER)
    return with_reasoning(options.reasoning_parser, TOOL_PARSERS[options.tool_call_parser])


@dataclass
class ParsedText:
    """One sample's text as far as it was parsed. is_parallel: it may have several calls. marked:
    for parsers that read marks of special tokens."""

    parser: Parser
    is_parallel: bool
    marked: MarkedText | None = None
    num_calls: int = 0
    has_ended: bool = False

    def read(self, text: str, output: CompletionOutput) -> Json:
        """What is new in the text, as a delta of a message."""
        return self.delta(self.pieces(text, output))

    def pieces(self, text: str, output: CompletionOutput) -> Sequence[Piece]:
        """What is new in the text, in its order."""
        pieces = self.parser.feed(text if self.marked is None else self.marked.new(output))
        if output.finish_reason is not None and not self.has_ended:
            self.has_ended = True
            pieces = [*pieces, *self.parser.finish()]
        return pieces

    def delta(self, pieces: Iterable[Piece]) -> Json:
        """A delta of a message that has the pieces, which come next."""
        delta: Json = {}
        for kind, new in pieces:
            if kind in (CONTENT, REASONING):
                delta[kind] = delta.get(kind, "") + new
                continue
            self.num_calls += kind == CALL
            if self.is_parallel or self.num_calls == 1:
                calls: list[Json] = delta.setdefault("tool_calls", [])
                _add_to_calls(calls, self.num_calls - 1, kind, new)
        return delta


def _add_to_calls(calls: list[Json], index: int, kind: str, new: str) -> None:
    if kind == CALL:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        function = {"name": new, "arguments": ""}
        calls.append({"index": index, "id": call_id, "type": "function", "function": function})
        return
    if not calls or calls[-1]["index"] != index:
        calls.append({"index": index, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += new


class ChatAnswer(Answer):
    """`/v1/chat/completions`. new_text: makes what parses a sample; None: its text is the answer.
    is_named: OpenAI ends calls of a named function with "stop", others with "tool_calls"."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    counts_reasoning = True

    def __init__(
        self,
        *arguments: Any,
        new_text: Callable[[], ParsedText] | None = None,
        is_named: bool = False,
    ) -> None:
        super().__init__(*arguments)
        self._new_text, self._is_named = new_text, is_named
        self._parsed: dict[int, ParsedText] = {}  # by choice

    @property
    def has_text_only(self) -> bool:
        return super().has_text_only and self._new_text is None

    def _content(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json:
        delta = self._read(index, output.text, output)
        calls = delta.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        message = {"role": "assistant", "content": None if calls else "", **delta}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._all_logprobs(output)}

    def _delta(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json | None:
        delta = self._read(index, output.text_diff, output)
        logprobs = self._new_logprobs(output)
        if not delta and logprobs is None and not output.finish_reason:
            return None
        role = {} if index in self._started else {"role": "assistant"}
        return {"delta": {**role, **delta}, "logprobs": logprobs}

    def _ending(self, index: int, output: CompletionOutput) -> Json:
        ending = super()._ending(index, output)
        has_calls = index in self._parsed and self._parsed[index].num_calls and not self._is_named
        if has_calls and ending["finish_reason"] == "stop":
            ending["finish_reason"] = "tool_calls"
        return ending

    def _read(self, index: int, text: str, output: CompletionOutput) -> Json:
        """What is new, as a delta of a message."""
        if self._new_text is None:
            return {"content": text}
        if index not in self._parsed:
            self._parsed[index] = self._new_text()
        return self._parsed[index].read(text, output)

    def _logprobs(self, token_ids: list[int], logprobs: Logprobs, offsets: list[int]) -> Json:
        return {
            "content": [
                {
                    **self._token(token, at[token], offset),
                    "top_logprobs": [self._token(*best, offset) for best in self._best(at)],
                }
                for token, at, offset in zip(token_ids, logprobs, offsets, strict=True)
                if at is not None
            ]
        }

    def _token(self, token_id: int, logprob: Logprob, offset: int) -> Json:
        text = self._token_text(token_id, offset)
        utf8: bytes | None = text.encode()
        if REPLACEMENT in text:  # a part of a character
            utf8 = bytes_of_token(self._tokenizer, token_id)
        return {"token": text, "logprob": number_of(logprob), "bytes": utf8 and list(utf8)}


def parsed_texts(
    body: ChatCompletionRequest,
    options: ServerOptions,
    harmony: Mapping[int, str],
    tokenizer: Tokenizer,
    *,
    is_guided: bool,
) -> Callable[[], ParsedText] | None:
    """Makes what reads a sample's text; None if the text is the answer. harmony: special tokens of
    a model that writes this format, or empty. Raises RequestRefused for tools without a parser."""
    is_harmony = bool(harmony) and not (options.tool_call_parser or options.reasoning_parser)
    new_parser = parser_of(body, options, is_guided=is_guided, is_harmony=is_harmony)
    if new_parser is None:
        return None
    is_marked = is_harmony and not is_guided
    return lambda: ParsedText(
        new_parser(),
        body.parallel_tool_calls,
        MarkedText(tokenizer, harmony) if is_marked else None,
    )
