"""Chat answers, whose text may have reasoning and calls of tools."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tllm_spec.chat_formats import names
from tllm_spec.chat_formats.chat_format import Function, calls_schema, num_chars
from tllm_spec.chat_formats.harmony import HarmonyParser, harmony_text
from tllm_spec.chat_formats.marked_text import MarkedText, unsplit
from tllm_spec.chat_formats.pieces import (
    CALL,
    CALL_ID,
    CONTENT,
    REASONING,
    ForcedCall,
    ForcedCalls,
    NewParser,
    Parser,
    PlainText,
)
from tllm_spec.chat_formats.reasoning import ReasoningParser
from tllm_spec.grammar.grammar_text import without_notes
from tllm_spec.grammar.guided_decoding import MAX_GRAMMAR_CHARS, MAX_TAG_CHARS, GuidedDecodingParams
from tllm_spec.outputs import CompletionOutput, Logprob, RequestOutput
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.answers import Answer, Json, Logprobs, number_of, usage_of
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.chat_message import AllowedTools, NamedChoice, chosen_names
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.protocol import ChatCompletionRequest, guided_params
from tllm_spec.server.refusals import RequestRefused
from tllm_spec.text.reasoning import Section, marker_tokens, section_after
from tllm_spec.text.tokenizer import REPLACEMENT, Tokenizer, bytes_of_token

logger = logging.getLogger(__name__)

TOO_LONG = "tools: the grammar of calls has over"
FREE = ("auto", "none")  # choices
NO_PARSER = (
    "tool_choice = 'auto' needs a server with --tool_call_parser; none, required and a function "
    "are served without"
)


class AnswerFormats:
    """What the model of a server writes, as the options name it, or as `auto` finds it in the chat
    template. harmony: special tokens of a model that writes this format, if no option names another
    one; or empty."""

    def __init__(
        self, options: ServerOptions, tokenizer: Tokenizer, harmony: Mapping[int, str]
    ) -> None:
        template, given = str(tokenizer.chat_template or ""), options.reasoning_parser
        reasoning = _named("reasoning_parser", given, names.AUTO_REASONING, template)
        calls = _named("tool_parser", options.tool_call_parser, names.AUTO_TOOLS, template)
        form = self._reasoning = names.REASONING[reasoning] if reasoning else None
        self._calls = names.tools_format(calls, template) if calls else None
        self._harmony = {} if reasoning or calls else harmony
        self._tokenizer = tokenizer
        markers = [form.opener, form.closer] if form else []
        of_calls = self._calls.markers if self._calls else ()
        # Names by id: of reasoning, and of calls, too.
        self._markers = marker_tokens(tokenizer, markers)
        self._all_markers = marker_tokens(tokenizer, [*markers, *of_calls])

    def section(self, prompt: Sequence[int]) -> Section:
        """How the answer to a rendered prompt begins."""
        if self._reasoning is None:
            return "over"
        return section_after(prompt, self._reasoning, self._markers, self._tokenizer)

    def guided(self, body: ChatCompletionRequest, params: SamplingParams) -> SamplingParams:
        """The parameters with a grammar of calls, in the model's own format or JSON, where the body
        asks for calls that match. Raises ValueError for what is too long or cannot be written."""
        choice, guided = body.mode, params.guided_decoding
        calls, is_free = self._calls, choice in FREE
        if guided is not None and not is_free:
            raise ValueError(
                "guided_decoding and tool_choice are given; one of them says what text must match"
            )
        functions, is_limited = _functions(body), isinstance(body.tool_choice, AllowedTools)
        is_bound = is_limited or any(each.is_strict for each in functions)
        is_named = isinstance(choice, NamedChoice)
        is_parallel = body.parallel_tool_calls and not is_named
        if calls is None and not is_free:
            several = calls_schema(functions, is_parallel=is_parallel)
            schema = functions[0].parameters if is_named else several
            return replace(params, guided_decoding=guided_params({"tool_choice": schema}))
        if calls is None or guided is not None or choice == "none" or not is_bound:
            return params
        make = calls.answer_tag if is_free else calls.calls_tag
        try:
            plain = [
                each._replace(parameters=without_notes(each.parameters)) if each.is_strict else each
                for each in functions
            ]
            # What takes long to make is not made.
            written = [len(json.dumps(each.parameters)) for each in plain if each.is_strict]
            if sum(written) > MAX_GRAMMAR_CHARS:
                raise ValueError(f"{TOO_LONG} {MAX_GRAMMAR_CHARS} characters of schemas")
            part = make(plain, is_parallel=is_parallel)
            if num_chars(part) > MAX_TAG_CHARS:
                raise ValueError(f"{TOO_LONG} {MAX_TAG_CHARS} characters")
        except RecursionError:
            raise ValueError("tools: a schema is nested too deeply") from None
        tag = {"type": "structural_tag", "format": part}
        return replace(params, guided_decoding=GuidedDecodingParams(structural_tag=tag))

    def new_texts(
        self, body: ChatCompletionRequest, *, is_guided: bool
    ) -> Callable[[Section], ParsedText] | None:
        """Makes what reads a sample's text that begins so; None if the text is the answer. Raises
        RequestRefused for tools without a parser."""
        choice, functions, is_parallel = body.mode, _functions(body), body.parallel_tool_calls
        is_free = choice in FREE
        if self._harmony and is_free and not is_guided:
            known = frozenset() if choice == "none" else {each.name for each in functions}
            return lambda section: ParsedText(
                HarmonyParser(known), is_parallel, harmony_text(self._tokenizer, self._harmony)
            )
        if choice == "auto" and self._calls is None and not is_guided:
            raise RequestRefused(400, NO_PARSER)
        calls = None if choice == "none" or (is_free and is_guided) else self._calls
        new_parser: NewParser = ForcedCalls if choice == "required" else PlainText
        if calls is not None:
            new_parser = partial(calls.new_parser, functions)
        elif isinstance(choice, NamedChoice):
            new_parser = partial(ForcedCall, choice.function.name)
        if new_parser is PlainText and self._reasoning is None:
            return None
        markers = self._all_markers if calls else self._markers
        marks = {token: (name, name) for token, name in markers.items()}
        skips = body.skip_special_tokens is not False

        def text(section: Section) -> ParsedText:
            parser = new_parser()
            if (form := self._reasoning) is not None:
                own = form if calls else replace(form, ends_at=())
                parser = ReasoningParser(parser, own, section)
            marked = MarkedText(self._tokenizer, marks, skip_special_tokens=skips)
            new_id = calls.new_id if calls else None
            return ParsedText(parser, is_parallel, marked if marks else None, new_id)

        return text


def _named(
    option: str, given: str | None, auto: Mapping[str, tuple[str, ...]], template: str
) -> str | None:
    found = given and names.name_of(given, auto, template)
    if given == names.AUTO:
        logger.info("--%s auto: %s, by the chat template", option, found or "none is known")
    return found


def _functions(body: ChatCompletionRequest) -> list[Function]:
    """Those that may be called. Where calls are forced they match the schemas, too."""
    tools, is_forced = [tool.function for tool in body.tools or ()], body.mode not in FREE
    names = chosen_names(body.tool_choice, [each.name for each in tools])
    return [
        Function(
            each.name, {"type": "object", **(each.parameters or {})}, bool(each.strict) or is_forced
        )
        for each in tools
        if each.name in names
    ]


@dataclass
class ParsedText:
    """One sample's text as far as it was parsed. is_parallel: it may have several calls. marked:
    reads marks of tokens; None: the text has none. new_id: makes ids of calls."""

    parser: Parser
    is_parallel: bool
    marked: MarkedText | None = None
    new_id: Callable[[], str] | None = None
    num_calls: int = 0
    reasoning: list[str] = field(default_factory=list)  # its pieces
    _ids: list[str] = field(default_factory=list)  # of calls, and of the next one if it is known

    def parts(self, text: str, output: CompletionOutput) -> Iterator[tuple[str, str, int, str]]:
        """What is new in the text, in its order: kinds and texts of pieces, and the number and the
        id of the latest call."""
        found = self.parser.feed(text if self.marked is None else self.marked.new(output))
        if output.finish_reason is not None:
            found = [*found, *self.parser.finish()]
        for kind, new in found:
            if kind == CALL_ID:
                self._ids += [] if new in self._ids else [new]
                continue
            if kind == REASONING:
                self.reasoning.append(unsplit(new))
            self.num_calls += kind == CALL
            if len(self._ids) < self.num_calls:
                self._ids.append(self.new_id() if self.new_id else f"call_{uuid.uuid4().hex[:24]}")
            if self.is_parallel or self.num_calls < 2 or kind in (CONTENT, REASONING):
                call = self.num_calls - 1
                yield kind, unsplit(new), call, self._ids[call] if self._ids else ""

    def delta(self, text: str, output: CompletionOutput) -> Json:
        """The same as a delta of a message."""
        delta: Json = {}
        for kind, new, index, call_id in self.parts(text, output):
            if kind in (CONTENT, REASONING):
                delta[kind] = delta.get(kind, "") + new
                continue
            calls: list[Json] = delta.setdefault("tool_calls", [])
            if kind == CALL:
                begun = {"index": index, "id": call_id, "type": "function"}
                calls.append({**begun, "function": {"name": new, "arguments": ""}})
                continue
            if not calls or calls[-1]["index"] != index:
                calls.append({"index": index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += new
        return delta


def chat_usage(
    tokenizer: Tokenizer, parsed: Iterable[ParsedText], results: Sequence[RequestOutput]
) -> Json:
    """Token counts, also of the reasoning's text: markers do not count."""
    usage, texts = usage_of(results), ["".join(each.reasoning) for each in parsed]
    number = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    details = {"reasoning_tokens": min(number, usage["completion_tokens"])}
    return {**usage, "completion_tokens_details": details}


class ChatAnswer(Answer):
    """`/v1/chat/completions`. new_text: makes what parses a sample; None: its text is the answer.
    is_named: OpenAI ends calls of a named function with "stop", others with "tool_calls"."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        *arguments: Any,
        new_text: Callable[[], ParsedText] | None = None,
        is_named: bool = False,
    ) -> None:
        super().__init__(*arguments)
        self._new_text, self._is_named = new_text, is_named
        self._parsed: dict[int, ParsedText] = {}  # by choice

    def is_slow(self, results: Sequence[RequestOutput]) -> bool:
        """Long reasoning is tokenised for the usage."""
        texts = [output.text for result in results for output in result.outputs]
        is_long = self._new_text is not None and sum(map(len, texts)) > LONG_BODY
        return is_long or super().is_slow(results)

    def _usage(self, results: Sequence[RequestOutput]) -> Json:
        return chat_usage(self._tokenizer, self._parsed.values(), results)

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
        delta = self._parsed[index].delta(text, output)
        # Clients read reasoning by either name.
        return delta | ({"reasoning": delta[REASONING]} if REASONING in delta else {})

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
