"""Compiles grammars for a tokenizer with xgrammar, in processes of their own, and keeps them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from queue import LifoQueue
from typing import Any

from tllm_spec.child_process import ChildProcess
from tllm_spec.grammar.guided_decoding import GrammarSource

MODULE = "tllm_spec.grammar.grammar_child"
NUM_PROCESSES = 2  # that compile at once
MAX_SECONDS = 10.0  # for one grammar
MAX_KEPT_BYTES = 256 << 20
MAX_REFUSED = 256  # grammars
MISSING = "guided decoding needs the package xgrammar: pip install 'tllm_spec[guided]'"


class GrammarCompiler:
    """Raises ValueError for a tokenizer without a vocabulary that xgrammar can read, and when
    xgrammar is missing. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        try:
            import xgrammar  # heavy, and an extra
        except ImportError as error:
            raise ValueError(MISSING) from error
        try:
            # xgrammar refuses an empty list, and drops ids that the vocabulary does not have.
            self._tokenizer = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_ids) or [vocab_size]
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"guided decoding cannot use this tokenizer: {error}") from error
        self._kept: OrderedDict[GrammarSource, Any] = OrderedDict()
        self._refused: OrderedDict[GrammarSource, str] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept and refused
        plain = self._tokenizer.serialize_json()
        self._processes = [
            ChildProcess("tllm_spec.grammar.grammar_child", plain) for _ in range(NUM_PROCESSES)
        ]
        # The latest one to be idle comes first: the second one is started when both are needed.
        self._idle: LifoQueue[ChildProcess] = LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def start(self) -> None:
        """Starts a process, which takes seconds, before a grammar needs it. Raises RuntimeError."""
        process = self._idle.get()
        try:
            process.start()
        finally:
            self._idle.put(process)

    def compile(self, source: GrammarSource) -> Any:
        """xgrammar's compiled grammar. Raises ValueError for a grammar with mistakes, for one that
        takes more than `MAX_SECONDS` or too much memory, and for one that was refused."""
        if (reason := self._refused.get(source)) is not None:
            raise ValueError(reason)
        found = self._kept.get(source)
        if found is None:
            process = self._idle.get()
            try:
                found = self._kept.get(source) or self._compile(process, source)
            finally:
                self._idle.put(process)
        return found

    def keeps(self, source: GrammarSource) -> bool:
        """Whether it is known already if the grammar can be used."""
        return source in self._kept or source in self._refused

    def refuse(self, source: GrammarSource, reason: str) -> None:
        """The latest `MAX_REFUSED` grammars of which this is said are not compiled."""
        with self._lock:
            self._kept.pop(source, None)
            self._refused[source] = reason
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def load(self, text: str) -> Any:
        """A compiled grammar of its JSON."""
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(text, self._tokenizer)

    def close(self) -> None:
        """Ends the processes. From any thread: what is being compiled is answered with an error."""
        for process in self._processes:
            process.kill()

    def _compile(self, process: ChildProcess, source: GrammarSource) -> Any:
        try:
            answer = process.ask({"kind": source.kind, "text": source.text}, MAX_SECONDS)
        except TimeoutError:
            answer = {"error": f"it takes more than {MAX_SECONDS:.0f} seconds to compile"}
        if answer is None:
            answer = {"error": "it needs too much memory or stack to compile"}
        if "error" in answer:
            raise ValueError(f"guided_decoding = {source.kind}: {answer['error']}")
        compiled = self.load(answer["compiled"])
        with self._lock:
            self._kept[source] = compiled
            while sum(each.memory_size_bytes for each in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled
