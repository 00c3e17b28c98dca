"""Chat answers, whose text may have reasoning and calls of tools."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tllm_spec.chat_formats.chat_format import ChatFormat, Function
from tllm_spec.chat_formats.harmony import HarmonyParser, harmony_text
from tllm_spec.chat_formats.marked_text import MarkedText, unsplit
from tllm_spec.chat_formats.names import (
    AUTO,
    TOOLS,
    reasoning_name,
    tools_format,
    tools_name,
)
from tllm_spec.chat_formats.names import (
    REASONING as REASONING_FORMATS,
)
from tllm_spec.chat_formats.pieces import (
    CALL,
    CALL_ID,
    CONTENT,
    REASONING,
    ForcedCall,
    ForcedCalls,
    NewParser,
    Parser,
    Piece,
    PlainText,
)
from tllm_spec.chat_formats.reasoning import ReasoningParser
from tllm_spec.grammar.guided_decoding import GuidedDecodingParams
from tllm_spec.outputs import CompletionOutput, Logprob, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.answers import Answer, Json, Logprobs, number_of
from tllm_spec.server.chat_message import NamedChoice
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.protocol import ChatCompletionRequest
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.reasoning import Marks, ReasoningFormat, Section, marker_tokens, section_after
from tllm_spec.text.tokenizer import REPLACEMENT, Tokenizer, bytes_of_token

logger = logging.getLogger(__name__)

NO_PARSER = (
    "tool_choice = 'auto' needs a server with --tool_call_parser; none, required and a function "
    "are served without"
)


@dataclass(frozen=True)
class AnswerFormats:
    """What the model of a server writes. harmony: special tokens of a model that writes this
    format, if no option names another one; or empty."""

    tokenizer: Tokenizer
    reasoning: ReasoningFormat | None
    calls: ChatFormat | None
    harmony: Mapping[int, str]
    marks: Marks  # of reasoning
    tokens: Mapping[int, str]  # names of markers of reasoning and of calls, by id

    @classmethod
    def of(
        cls, options: ServerOptions, tokenizer: Tokenizer, harmony: Mapping[int, str]
    ) -> AnswerFormats:
        """Those that the options name, or that `auto` finds in the chat template. Raises ValueError
        for unknown names."""
        template = str(tokenizer.chat_template or "")
        reasoning = _named("reasoning_parser", options.reasoning_parser, reasoning_name, template)
        calls = _named("tool_parser", options.tool_call_parser, tools_name, template)
        if (reasoning or "") not in {"", *REASONING_FORMATS} or (calls or "") not in {"", *TOOLS}:
            raise ValueError(
                f"--reasoning_parser {reasoning}, --tool_parser {calls}: "
                f"{', '.join(REASONING_FORMATS)} and {', '.join(TOOLS)} are accepted"
            )
        form = None if reasoning is None else REASONING_FORMATS[reasoning]
        own = None if calls is None else tools_format(calls, template)
        markers = [] if form is None else [form.opener, form.closer]
        tokens = marker_tokens(tokenizer, [*markers, *(own.markers if own else ())])
        other = {} if reasoning or calls else harmony
        return cls(tokenizer, form, own, other, Marks(tokenizer, markers), tokens)

    def section(self, prompt: Sequence[int]) -> Section:
        """How the answer to a rendered prompt begins."""
        if self.reasoning is None:
            return "over"
        return section_after(prompt, self.reasoning, self.marks, self.tokenizer)

    def guided(self, body: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
        """The parameters with a grammar of calls in the model's own format, where the body asks for
        calls that match. Raises ValueError for one that is too long, or that cannot be written."""
        calls, functions = self.calls, _functions(body)
        if calls is None:
            return params
        if isinstance(body.tool_choice, NamedChoice):
            name = body.tool_choice.function.name
            chosen = [each for each in functions if each.name == name]
            part = calls.calls_tag(chosen, is_parallel=False)
        elif body.tool_choice == "required":
            part = calls.calls_tag(functions, is_parallel=body.parallel_tool_calls)
        elif (
            _choice(body) == "auto"
            and params.guided_decoding is None
            and any(each.is_strict for each in functions)
        ):
            part = calls.answer_tag(functions, is_parallel=body.parallel_tool_calls)
        else:
            return params
        tag = {"type": "structural_tag", "format": part}
        return replace(params, guided_decoding=GuidedDecodingParams(structural_tag=tag))

    def new_texts(
        self, body: ChatCompletionRequest, *, is_guided: bool
    ) -> Callable[[], ParsedText] | None:
        """Makes what reads a sample's text; None if the text is the answer. Raises RequestRefused
        for tools without a parser."""
        choice, calls = _choice(body), self._read_calls(body)
        if self.harmony and not is_guided and not _is_forced(body):
            names = [] if choice == "none" else [each.name for each in _functions(body)]
            return lambda: ParsedText(
                lambda: HarmonyParser(frozenset(names)),
                body.parallel_tool_calls,
                harmony_text(self.tokenizer, self.harmony),
            )
        if choice == "auto" and calls is None and not is_guided:
            raise RequestRefused(400, NO_PARSER)
        if is_guided and not _is_forced(body):
            calls = None
        new_parser, form = self._parser(body, calls), self.reasoning
        if new_parser is PlainText and form is None:
            return None
        if form is not None and calls is None:
            form = replace(form, ends_at=())
        own = {i: name for i, name in self.tokens.items() if calls or i in self.marks.of_token}

        def parser() -> Parser:
            answer = new_parser()
            return answer if form is None else ReasoningParser(answer, form, body.section)

        def text() -> ParsedText:
            marks = {token: (name, name) for token, name in own.items()}
            skips = body.skip_special_tokens is not False
            marked = MarkedText(self.tokenizer, marks, skip_special_tokens=skips) if marks else None
            new_id = None if calls is None else calls.new_id
            return ParsedText(parser, body.parallel_tool_calls, marked, new_id)

        return text

    def _parser(self, body: ChatCompletionRequest, calls: ChatFormat | None) -> NewParser:
        if calls is not None:
            functions = _functions(body)
            return lambda: calls.new_parser(functions)
        if isinstance(body.tool_choice, NamedChoice):
            name = body.tool_choice.function.name
            return lambda: ForcedCall(name)
        return ForcedCalls if body.tool_choice == "required" else PlainText

    def _read_calls(self, body: ChatCompletionRequest) -> ChatFormat | None:
        return None if _choice(body) == "none" else self.calls


def _named(
    option: str, given: str | None, name_of: Callable[[str, str], str | None], template: str
) -> str | None:
    if given is None:
        return None
    found = name_of(given, template)
    if given == AUTO:
        logger.info("--%s auto: %s, by the chat template", option, found or "none is known")
    return found


def _choice(body: ChatCompletionRequest) -> Any:
    return body.tool_choice or ("auto" if body.tools else "none")


def _is_forced(body: ChatCompletionRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedChoice)


def _functions(body: ChatCompletionRequest) -> list[Function]:
    return [
        Function(each.name, {"type": "object", **(each.parameters or {})}, bool(each.strict))
        for each in (tool.function for tool in body.tools or ())
    ]


@dataclass
class ParsedText:
    """One sample's text as far as it was parsed. new_parser: makes the parser with the first text,
    when the prompt is known. is_parallel: it may have several calls. marked: reads marks of tokens;
    None: the text has none. new_id: makes ids of calls."""

    new_parser: NewParser
    is_parallel: bool
    marked: MarkedText | None = None
    new_id: Callable[[], str] | None = None
    num_calls: int = 0
    has_ended: bool = False
    _parser: Parser | None = None
    _ids: list[str] = field(default_factory=list)  # of calls, and of the next one if it is known

    def read(self, text: str, output: CompletionOutput) -> Json:
        """What is new in the text, as a delta of a message."""
        return self.delta(self.pieces(text, output))

    def pieces(self, text: str, output: CompletionOutput) -> Sequence[Piece]:
        """What is new in the text, in its order."""
        if self._parser is None:
            self._parser = self.new_parser()
        found = self._parser.feed(text if self.marked is None else self.marked.new(output))
        if output.finish_reason is not None and not self.has_ended:
            self.has_ended = True
            found = [*found, *self._parser.finish()]
        return [Piece(kind, unsplit(new)) for kind, new in found]

    def delta(self, pieces: Iterable[Piece]) -> Json:
        """A delta of a message that has the pieces, which come next."""
        delta: Json = {}
        for kind, new in pieces:
            if kind in (CONTENT, REASONING):
                delta[kind] = delta.get(kind, "") + new
                continue
            if kind == CALL_ID:
                if new not in self._ids:
                    self._ids.append(new)
                continue
            self.num_calls += kind == CALL
            if self.is_parallel or self.num_calls == 1:
                calls: list[Json] = delta.setdefault("tool_calls", [])
                self._add_to_calls(calls, kind, new)
        return delta

    def _add_to_calls(self, calls: list[Json], kind: str, new: str) -> None:
        index = self.num_calls - 1
        if kind == CALL:
            if len(self._ids) < self.num_calls:
                own = self.new_id() if self.new_id else f"call_{uuid.uuid4().hex[:24]}"
                self._ids.append(own)
            function = {"name": new, "arguments": ""}
            call_id = self._ids[index]
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
        delta = _with_both_names(self._read(index, output.text, output))
        calls = delta.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        message = {"role": "assistant", "content": None if calls else "", **delta}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._all_logprobs(output)}

    def _delta(self, index: int, result: RequestOutput, output: CompletionOutput) -> Json | None:
        delta = _with_both_names(self._read(index, output.text_diff, output))
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


def _with_both_names(delta: Json) -> Json:
    """Clients read reasoning by either name."""
    return delta | ({"reasoning": delta[REASONING]} if REASONING in delta else {})
