"""Chat answers whose text has reasoning and calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tllm_spec.outputs import CompletionOutput, RequestOutput
from tllm_spec.server.answers import ChatAnswer, Json
from tllm_spec.server.chat_message import NamedChoice
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.parsers.harmony import HarmonyParser, MarkedText
from tllm_spec.server.parsers.names import TOOL_PARSERS, PlainText, with_reasoning
from tllm_spec.server.parsers.pieces import (
    Arguments,
    CallStart,
    ForcedCall,
    ForcedCalls,
    NewParser,
    Parser,
    Piece,
    Reasoning,
    Text,
)
from tllm_spec.server.protocol import ChatCompletionRequest
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.tokenizer import Tokenizer

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
    """One sample's text as far as it was parsed. marked: for parsers that read marks of special
    tokens."""

    parser: Parser
    marked: MarkedText | None = None
    num_calls: int = 0
    has_ended: bool = False
    # What the text that was last read has added: reasoning, content and calls.
    delta: Json = field(default_factory=dict)

    def read(self, text: str, output: CompletionOutput, *, is_parallel: bool) -> Json:
        """What is new in the text, as a delta of a message."""
        pieces = self.parser.feed(text if self.marked is None else self.marked.new(output))
        if output.finish_reason is not None and not self.has_ended:
            self.has_ended = True
            pieces = [*pieces, *self.parser.finish()]
        self.delta = {}
        self._add(pieces, is_parallel=is_parallel)
        return self.delta

    def _add(self, pieces: Sequence[Piece], *, is_parallel: bool) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self._append("content", piece.text)
            elif isinstance(piece, Reasoning):
                self._append("reasoning_content", piece.text)
            elif isinstance(piece, CallStart):
                self.num_calls += 1
                if is_parallel or self.num_calls == 1:
                    self._calls().append(_call(self.num_calls - 1, piece.name))
            elif is_parallel or self.num_calls == 1:
                self._add_arguments(piece)

    def _append(self, name: str, text: str) -> None:
        self.delta[name] = self.delta.get(name, "") + text

    def _calls(self) -> list[Json]:
        calls: list[Json] = self.delta.setdefault("tool_calls", [])
        return calls

    def _add_arguments(self, piece: Arguments) -> None:
        index, calls = self.num_calls - 1, self._calls()
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.text


class ParsedChatAnswer(ChatAnswer):
    """`/v1/chat/completions` with a parser. is_parallel: an answer may have several calls.
    is_named: OpenAI ends such an answer with "stop", other calls with "tool_calls"."""

    def __init__(
        self,
        new_text: Callable[[], ParsedText],
        *arguments: Any,
        is_parallel: bool,
        is_named: bool,
    ) -> None:
        super().__init__(*arguments)
        self._new_text = new_text
        self._is_parallel = is_parallel
        self._is_named = is_named
        self._choices: dict[int, ParsedText] = {}

    @property
    def has_text_only(self) -> bool:
        return False

    def _content(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json:
        delta = self._read(index, output.text, output)
        calls = [
            {name: value for name, value in call.items() if name != "index"}
            for call in delta.get("tool_calls", ())
        ]
        content = delta.get("content", None if calls else "")
        message: Json = {"role": "assistant", "content": content}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
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
        has_calls = self._choices[index].num_calls and not self._is_named
        if has_calls and ending["finish_reason"] == "stop":
            ending["finish_reason"] = "tool_calls"
        return ending

    def _read(self, index: int, text: str, output: CompletionOutput) -> Json:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._new_text()
        return choice.read(text, output, is_parallel=self._is_parallel)


def _call(index: int, name: str) -> Json:
    function = {"name": name, "arguments": ""}
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {"index": index, "id": call_id, "type": "function", "function": function}


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
    return lambda: ParsedText(new_parser(), MarkedText(tokenizer, harmony) if is_marked else None)


def chat_answer(
    body: ChatCompletionRequest,
    new_text: Callable[[], ParsedText] | None,
    *arguments: Any,
) -> ChatAnswer:
    """new_text: of `parsed_texts`. The next arguments: of ChatAnswer."""
    if new_text is None:
        return ChatAnswer(*arguments)
    is_named = isinstance(body.tool_choice, NamedChoice)
    is_parallel = body.parallel_tool_calls
    return ParsedChatAnswer(new_text, *arguments, is_parallel=is_parallel, is_named=is_named)
