"""Compiles grammars for a tokenizer with xgrammar, in processes of their own, and keeps them."""

from __future__ import annotations

import select
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import LifoQueue
from typing import Any

from tllm_spec.child_command import module_command
from tllm_spec.grammar_child import read_message, write_message
from tllm_spec.guided_decoding import GrammarSource

NUM_PROCESSES = 2  # that compile at once
MAX_SECONDS = 10.0  # for one grammar
MAX_START_SECONDS = 120.0
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
        self._processes = [_Process(plain) for _ in range(NUM_PROCESSES)]
        # The latest one to be idle comes first: the second one is started when both are needed.
        self._idle: LifoQueue[_Process] = LifoQueue()
        for process in self._processes:
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

    def _compile(self, process: _Process, source: GrammarSource) -> Any:
        answer = process.ask({"kind": source.kind, "text": source.text})
        if "error" in answer:
            raise ValueError(f"guided_decoding = {source.kind}: {answer['error']}")
        compiled = self.load(answer["compiled"])
        with self._lock:
            self._kept[source] = compiled
            while sum(each.memory_size_bytes for each in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled


class _Process:
    """One that compiles; it is started when it is asked for the first time. tokenizer: xgrammar's,
    as JSON. One thread at a time may ask it."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def kill(self) -> None:
        """From any thread. Its pipes stay open for the thread that may be reading from them."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def ask(self, message: dict[str, str]) -> dict[str, str]:
        child = self._child if self._child and self._child.poll() is None else self._start()
        assert child.stdin is not None
        try:
            write_message(child.stdin, message)
            answer: dict[str, str] | None = _receive(child, MAX_SECONDS)
        except BrokenPipeError:
            answer = None
        except TimeoutError:
            answer = {"error": f"it takes more than {MAX_SECONDS:.0f} seconds to compile"}
            self._end()
        return answer or {"error": "it needs too much memory or stack to compile"}

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises RuntimeError if the process does not start."""
        self._end()
        command = module_command("tllm_spec.grammar_child")
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._child, self._end = child, weakref.finalize(self, _kill, child)
        assert child.stdin is not None
        write_message(child.stdin, self._tokenizer)
        if _receive(child, MAX_START_SECONDS) is None:
            raise RuntimeError("the process that compiles grammars did not start")
        return child


def _receive(child: subprocess.Popen[bytes], seconds: float) -> Any:
    """A message; None if the process has ended. Raises TimeoutError."""
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], seconds)[0]:
        raise TimeoutError
    return read_message(child.stdout)


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # of a message that the process has not read
            pipe.close()
