"""Gives requests with `guided_decoding` their grammars, compiled for the model's tokenizer, and
what reasoning says about them: where the grammar begins, and a budget of thinking."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from tllm_spec.chat_formats.names import AUTO_REASONING, MARKERS, REASONING, name_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.grammar_text import compiled, forces_much
from tllm_spec.grammar.guided_decoding import GrammarSource, GuidedDecodingParams
from tllm_spec.grammar.structural_tags import NamedTokens
from tllm_spec.grammar.thinking_budget import Budget, Sections, TextRules, ThinkingBudget
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.reasoning import ReasoningFormat, Section, marker_tokens, section_after
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.text.vocabulary import harmony_ends, token_bytes

OFF = "guided_decoding is refused: guided_decoding_backend = null; llguidance is accepted"
NO_TOKENIZER = "guided_decoding needs a tokenizer, which skip_tokenizer_init = true leaves out"
MISSING = "guided decoding needs the package llguidance: pip install 'tllm_spec[guided]'"
MAX_KNOWN = 256  # grammars, refused ones, too
# Of the thread that compiles a grammar: references of a schema may be thousands deep.
STACK_BYTES = 128 << 20
LOW_PRIORITY = 10  # as of `nice`: rounds go on next to a compilation


class Grammars:
    """Loads llguidance with the first such request. Thread-safe."""

    def __init__(
        self, backend: str | None, tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...]
    ) -> None:
        self._backend = backend
        self._arguments = tokenizer, vocab_size, end_ids
        self._end_ids = frozenset(end_ids)
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._tokens = named_tokens(tokenizer, self._end_ids)
        self.sections = BudgetSections(tokenizer, vocab_size)
        self._known: OrderedDict[GrammarSource, CompiledGrammar | str] = OrderedDict()
        self._lock = threading.Lock()  # of what is known, and of the size of stacks

    @classmethod
    def of(cls, args: LlmArgs, tokenizer: Tokenizer | None, limits: RequestLimits) -> Grammars:
        """The grammars of a model with these limits."""
        end_ids = end_ids_of(limits, tokenizer)
        return cls(args.guided_decoding_backend, tokenizer, limits.vocab_size, end_ids)

    def states_of(self, source: GrammarSource | None, number: int) -> Sequence[TextRules | None]:
        """One for each sample; None without a grammar or budget. Every rank makes the same ones.
        Raises ValueError for a grammar that cannot be used."""
        if source is None:
            return [None] * number
        if (sections := self.sections.of(source)) is None:
            return self._of(source, number)
        inner = Budget.of(source)[1]
        grammars = [None] * number if inner is None else self._of(inner, number)
        return [ThinkingBudget(source, sections, each) for each in grammars]

    def _of(self, source: GrammarSource, number: int) -> list[GrammarState]:
        found = self._known.get(source) or self._compile(source)
        if isinstance(found, str):
            raise ValueError(found)
        return [GrammarState(found) for _ in range(number)]

    def keeps(self, source: GrammarSource) -> bool:
        """Whether it is known already if the grammar can be used."""
        return source in self._known

    def prepare(self) -> None:
        """Makes ready, in a thread, what the first grammar would wait for. Where grammars cannot be
        used, the requests that have one are told so."""

        def load() -> None:
            with suppress(ValueError):
                self._load()

        threading.Thread(target=load, name="tllm-first-grammar", daemon=True).start()

    def _compile(self, source: GrammarSource) -> CompiledGrammar | str:
        tokenizer, result = self._load(), Future[Any]()

        def run() -> None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
            try:
                result.set_result(compiled(source, tokenizer, self._tokens))
            except BaseException as error:  # noqa: BLE001 # a thread's border: raised below
                result.set_exception(error)

        with self._lock:
            usual = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=run, name="tllm-grammar", daemon=True).start()
            finally:
                threading.stack_size(usual)
        try:
            start = result.result()
        except ValueError as error:
            return self._keep(source, str(error))
        made = CompiledGrammar(
            source,
            start,
            self._end_ids,
            num_words=-(-tokenizer.vocab_size // 32),
            drafts_forced=not forces_much(source),
            refuse=partial(self._refuse, source),
            spelt=tokenizer.tokenize_bytes,
        )
        return self._keep(source, made)

    def _keep(self, source: GrammarSource, found: CompiledGrammar | str) -> CompiledGrammar | str:
        """found: a grammar, or why it is refused."""
        with self._lock:
            self._known[source] = found
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def _refuse(self, source: GrammarSource, reason: str) -> None:
        self._keep(source, reason)

    def _load(self) -> Any:
        """llguidance's tokenizer, which is made once: 3 seconds for 128,000 tokens."""
        if self._backend is None:
            raise ValueError(OFF)
        if self._arguments[0] is None:
            raise ValueError(NO_TOKENIZER)
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = masks_tokenizer(*self._arguments)
            return self._tokenizer


def masks_tokenizer(tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...]) -> Any:
    """An `LLTokenizer`. It may have more tokens than the model, and its end token may be one of
    those. Raises ValueError for a tokenizer that llguidance cannot read, and when llguidance is
    missing."""
    try:
        from llguidance.hf import from_tokenizer  # an extra
    except ImportError as error:
        raise ValueError(MISSING) from error
    try:
        size = max(vocab_size, *(1 + each for each in tokenizer.get_vocab().values()))
        ends = list(end_ids) or tokenizer.eos_token_id
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"guided decoding cannot use this tokenizer: {error}") from error


class BudgetSections:
    """What finds the forced ends of budgets. The table of a vocabulary's bytes is made when a
    marker that is no token first needs it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        table = lru_cache(1)(partial(token_bytes, tokenizer, vocab_size))
        self._made = lru_cache(MAX_KNOWN)(lambda source: Sections(Budget.of(source)[0], table))

    def of(self, source: GrammarSource | None) -> Sections | None:
        """None without a budget."""
        is_budget = source is not None and source.kind == "thinking_budget"
        return self._made(source) if is_budget else None


class ReasoningRules:
    """What the model's reasoning says about the text of a request. Raises ValueError for a format
    that is not known."""

    def __init__(self, args: LlmArgs, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.sections = BudgetSections(tokenizer, vocab_size)
        self._tokenizer, self._form = tokenizer, _form_of(args, tokenizer)
        self._in_reasoning = args.enable_in_reasoning or self._form is None
        if (form := self._form) is not None and tokenizer is not None:
            self._markers = marker_tokens(tokenizer, (form.opener, form.closer))
            parts = named_tokens(tokenizer, frozenset()).parts
            self._opener, self._closer = parts(form.opener), parts(form.closer)
            self._calls = [parts(each) for each in form.ends_at]

    def grammar_of(self, params: SamplingParams) -> GrammarSource | None:
        """The request's grammar with every way in which the answer may begin, to check it before
        the prompt is known."""
        return self._after("undecided", params.guided_decoding)

    def source_of(self, params: SamplingParams, prompt: Sequence[int]) -> GrammarSource | None:
        """The request's grammar and budget. Raises ValueError for a budget where no section is
        known, or where the grammar leaves none free."""
        if params.guided_decoding is None and params.thinking_budget is None:
            return None
        section: Section = "over"
        if self._form is not None and self._tokenizer is not None:
            section = section_after(prompt, self._form, self._markers, self._tokenizer)
        after = self._after(section, params.guided_decoding)
        if params.thinking_budget is None:
            return after
        return self._budget(params, section, prompt).source(after)

    def _budget(self, params: SamplingParams, section: Section, prompt: Sequence[int]) -> Budget:
        assert params.thinking_budget is not None
        (num_tokens, processor), guided = params.thinking_budget, params.guided_decoding
        if guided is not None and self._in_reasoning:
            raise ValueError(
                f"thinking_token_budget = {num_tokens} and a grammar: this begins at the first "
                "token, unless there is a reasoning_parser without enable_in_reasoning"
            )
        if processor is not None:
            begin, end = processor.reasoning_start_token_ids, processor.reasoning_end_token_ids
            section = "inside" if _last(prompt, begin) > _last(prompt, end) else "undecided"
            return Budget(num_tokens, begin, [end], section, guided is not None)
        if self._form is None:
            raise ValueError(
                f"thinking_token_budget = {num_tokens} needs reasoning_parser, the format of the "
                "model's reasoning"
            )
        has_calls = guided is None or guided.source.kind == "structural_tag"
        closers = [self._closer, *(self._calls if has_calls else ())]
        return Budget(num_tokens, self._opener, closers, section, guided is not None)

    def _after(self, section: Section, guided: GuidedDecodingParams | None) -> GrammarSource | None:
        if guided is None:
            return None
        if self._form is None or self._in_reasoning:
            return guided.source
        return after_reasoning(guided.source, self._form, section)


def _form_of(args: LlmArgs, tokenizer: Tokenizer | None) -> ReasoningFormat | None:
    if args.reasoning_parser is None:
        return None
    if tokenizer is None:
        raise ValueError("reasoning_parser needs a tokenizer; drop skip_tokenizer_init")
    name = name_of(args.reasoning_parser, AUTO_REASONING, str(tokenizer.chat_template or ""))
    if name is not None and name not in REASONING:
        known = ", ".join(sorted(REASONING))
        raise ValueError(f"reasoning_parser = {name!r}: {known} and auto are accepted")
    return None if name is None else REASONING[name]


def _last(tokens: Sequence[int], part: Sequence[int]) -> int:
    """Where the part begins for the last time; -1: nowhere."""
    places = range(len(tokens) - len(part), -1, -1)
    return next((i for i in places if [*tokens[i : i + len(part)]] == [*part]), -1)


def after_reasoning(
    source: GrammarSource, form: ReasoningFormat, section: Section
) -> GrammarSource:
    """The grammar of an answer that begins so, whose text after reasoning matches `source`."""
    if section == "over":
        return source
    part: Any = {"type": source.kind, source.kind: source.text}
    is_tag, is_choice = source.kind == "structural_tag", source.kind == "choice"
    if is_tag:
        part = json.loads(source.text)["format"]
    elif source.kind == "json_schema":
        part["json_schema"] = json.loads(source.text)
    elif source.kind in ("regex", "choice"):
        pattern = "|".join(map(re.escape, json.loads(source.text))) if is_choice else source.text
        part = {"type": "regex", "pattern": pattern}
    thoughts = {
        "type": "reasoning",
        "section": section,
        "begin": form.opener,
        "end": form.closer,
        "ends_at": [*form.ends_at] if is_tag else [],
    }
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [thoughts, part]}}
    return GrammarSource("structural_tag", json.dumps(tag))


def named_tokens(tokenizer: Any, end_ids: frozenset[int]) -> NamedTokens:
    """The tokens that literals may name: special ones, and markers of the models' formats."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = frozenset(token for token, name in added if name.special) - end_ids
    return NamedTokens(
        {str(name): i for i, name in added if i in special or str(name) in MARKERS},
        special,
        end_ids,
    )


def end_ids_of(limits: RequestLimits, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's end tokens, and the tokenizer's: that of a chat model may not be in the files of
    the base model. Ids that the vocabulary does not have are left out: the model cannot choose
    them."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    ids = (*limits.end_ids, *(() if own is None else (own,)), *harmony_ends(tokenizer))
    return tuple(each for each in dict.fromkeys(ids) if 0 <= each < limits.vocab_size)
