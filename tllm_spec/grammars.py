"""Gives requests with `guided_decoding` their grammars, compiled for the model's tokenizer."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.grammar_text import compiled, forces_much
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.grammar.structural_tags import NamedTokens
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.text.vocabulary import harmony_ends

OFF = "guided_decoding is refused: guided_decoding_backend = null; llguidance is accepted"
NO_TOKENIZER = "guided_decoding needs a tokenizer, which skip_tokenizer_init = true leaves out"
MISSING = "guided decoding needs the package llguidance: pip install 'tllm_spec[guided]'"
MAX_KNOWN = 256  # grammars, refused ones, too
# Of the thread that compiles a grammar: references of a schema may be thousands deep.
STACK_BYTES = 128 << 20
MARKER = re.compile(r"[^\w\s].*\w.*[^\w\s]", flags=re.DOTALL)
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
        self._known: OrderedDict[GrammarSource, CompiledGrammar | str] = OrderedDict()
        self._lock = threading.Lock()  # of what is known, and of the size of stacks

    @classmethod
    def of(cls, args: LlmArgs, tokenizer: Tokenizer | None, limits: RequestLimits) -> Grammars:
        """The grammars of a model with these limits."""
        end_ids = end_ids_of(limits, tokenizer)
        return cls(args.guided_decoding_backend, tokenizer, limits.vocab_size, end_ids)

    def new_states(self, params: SamplingParams, number: int) -> list[GrammarState | None]:
        """One for each sample; None without `guided_decoding`. Raises ValueError for a grammar that
        cannot be used."""
        if params.guided_decoding is None:
            return [None] * number
        return self.states_of(params.guided_decoding.source, number)

    def states_of(self, source: GrammarSource, number: int) -> list[GrammarState | None]:
        """The same for a grammar. Every rank makes the same states."""
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


def named_tokens(tokenizer: Any, end_ids: frozenset[int]) -> NamedTokens:
    """The tokens that literals may name: special ones, and others that were added and look like a
    marker, as `<think>` does and a line end does not."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = frozenset(token for token, name in added if name.special) - end_ids
    return NamedTokens(
        {str(name): i for i, name in added if i in special or MARKER.fullmatch(str(name))},
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
