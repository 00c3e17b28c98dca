"""Gives requests with `guided_decoding` their grammars, compiled for the model's tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_limits import RequestLimits
from tllm_spec.grammar.grammar_compiler import GrammarCompiler
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.text.harmony import harmony_ends
from tllm_spec.text.tokenizer import Tokenizer

OFF = "guided_decoding is refused: guided_decoding_backend = null; xgrammar is accepted"
NO_TOKENIZER = "guided_decoding needs a tokenizer, which skip_tokenizer_init = true leaves out"


def _accept(reason: str) -> None:
    """A rank that compiles nothing accepts all: rank 0 refuses grammars."""


class Grammars:
    """Loads xgrammar with the first such request. Thread-safe."""

    def __init__(
        self, backend: str | None, tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...]
    ) -> None:
        self._backend = backend
        self._arguments = tokenizer, vocab_size, end_ids
        self._encode = lru_cache(maxsize=4096)(partial(_encode, tokenizer))
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._loaded: dict[int, Any] = {}  # on other ranks than 0, by rank 0's number

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
        """The same for a grammar."""
        compiler = self._get_compiler()
        refuse = partial(compiler.refuse, source)
        return self._states(compiler.compile(source), number, refuse)

    def keeps(self, source: GrammarSource) -> bool:
        """Whether the grammar is compiled already."""
        return self._compiler is not None and self._compiler.keeps(source)

    def load_states(self, message: Sequence[Any], number: int) -> list[GrammarState | None]:
        """The same for a grammar that rank 0 has compiled. message: of its `SentGrammars`."""
        key, text, dropped = message
        for each in dropped:
            del self._loaded[each]
        if text is not None:
            self._loaded[key] = self._get_compiler().load(text)
        return self._states(self._loaded[key], number)

    def prepare(self) -> None:
        """Makes ready, in a thread, what the first grammar would wait for. Where grammars cannot be
        used, the requests that have one are told so."""

        def start() -> None:
            with suppress(ValueError, RuntimeError):
                self._get_compiler().start()

        threading.Thread(target=start, name="tllm-first-grammar", daemon=True).start()

    def close(self) -> None:
        """Ends the compiler's process."""
        if self._compiler is not None:
            self._compiler.close()

    def _states(
        self, compiled: Any, number: int, refuse: Callable[[str], None] = _accept
    ) -> list[GrammarState | None]:
        import xgrammar  # heavy; the compiler has it

        return [
            GrammarState(xgrammar.GrammarMatcher(compiled), compiled, self._encode, refuse)
            for _ in range(number)
        ]

    def _get_compiler(self) -> GrammarCompiler:
        if self._backend is None:
            raise ValueError(OFF)
        if self._arguments[0] is None:
            raise ValueError(NO_TOKENIZER)
        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(*self._arguments)
            return self._compiler


def end_ids_of(limits: RequestLimits, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's end tokens, and the tokenizer's: that of a chat model may not be in the files of
    the base model. Ids that the vocabulary does not have are left out: the model cannot choose
    them."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    ids = (*limits.end_ids, *(() if own is None else (own,)), *harmony_ends(tokenizer))
    return tuple(each for each in dict.fromkeys(ids) if 0 <= each < limits.vocab_size)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
