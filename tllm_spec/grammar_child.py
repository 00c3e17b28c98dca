"""The process that compiles grammars (`grammar_compiler.py` starts it): a grammar that takes too
long or too much memory is ended with its process, and harms nothing else.

Messages are JSON after their length in four bytes, on standard input and output."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
import sys
from typing import IO, Any

from tllm_spec.grammar.xgrammar_source import compile_text

MAX_MESSAGE_BYTES = 64 << 20  # of a compiled grammar, too
MAX_EXTRA_BYTES = 2 << 30  # of address space, on top of what the libraries have taken
MAX_ERROR_CHARS = 500
NO_MEMORY = "it needs too much memory to compile"
NO_TEXT = "no text matches it"


def write_message(stream: IO[bytes], message: Any) -> None:
    data = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    data = stream.read(length)
    return json.loads(data) if len(data) == length else None


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


def _limit_memory() -> None:
    """The host's own limit (`ulimit -v`) may be lower, and cannot be raised."""
    with open("/proc/self/statm") as numbers:
        size = int(numbers.read().split()[0]) * resource.getpagesize()
    wanted, (_, hard) = size + MAX_EXTRA_BYTES, resource.getrlimit(resource.RLIMIT_AS)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but messages goes to the pipe
    import xgrammar  # heavy: takes two seconds

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(read_message(source))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    _limit_memory()
    # From here on xgrammar writes what a client has sent to standard error: that is the log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    write_message(out, {"ready": True})
    while (message := read_message(source)) is not None:
        write_message(out, _answer(compiler, message))


if __name__ == "__main__":
    main()
