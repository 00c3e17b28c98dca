"""The process that compiles grammars (`grammar_compiler.py` starts it): a grammar that takes too
long or too much memory is ended with its process, and harms nothing else."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

from tllm_spec.child_messages import answer_messages, read_message
from tllm_spec.grammar.xgrammar_source import compile_text

MAX_MESSAGE_BYTES = 64 << 20  # of a compiled grammar, too
MAX_EXTRA_BYTES = 2 << 30  # of address space, on top of what the libraries have taken
MAX_ERROR_CHARS = 500
NO_MEMORY = "it needs too much memory to compile"
NO_TEXT = "no text matches it"


def _can_begin(compiled: Any) -> bool:
    """Whether a text has a first token. xgrammar compiles rules that only lead to themselves."""
    import xgrammar  # heavy

    bitmask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask)
    return bool(bitmask.any())


def _answer(compiler: Any, message: dict[str, str]) -> dict[str, str]:
    try:
        grammar = compile_text(compiler, message["kind"], message["text"])
        if not _can_begin(grammar):
            return {"error": NO_TEXT}
        compiled = grammar.serialize_json()
    except MemoryError:
        return {"error": NO_MEMORY}
    except Exception as error:  # noqa: BLE001 # a process border: any error is an answer
        return {"error": _reason(error)}
    if len(compiled) > MAX_MESSAGE_BYTES:
        return {"error": f"compiled it has {len(compiled) >> 20} MiB"}
    return {"compiled": compiled}


def _reason(error: Exception) -> str:
    """xgrammar's message without its time, source line and condition in C++."""
    if "bad_alloc" in str(error):
        return NO_MEMORY
    head = r"^\[[\d:]+\] \S+: (?:Check failed: \(.*?\) is false: )?"
    text = re.sub(head, "", str(error).strip())
    return text[:MAX_ERROR_CHARS] or type(error).__name__


def main() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but messages goes to the pipe
    import xgrammar  # heavy: takes two seconds

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(read_message(source))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    answer_messages(source, out, partial(_answer, compiler), max_extra_bytes=MAX_EXTRA_BYTES)


if __name__ == "__main__":
    main()
