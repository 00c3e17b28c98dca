"""What a process with limits and its parent say to each other (`child_process.py` starts it).

Messages are JSON after their length in four bytes, on standard input and output."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

# After which the child ends itself: no answer takes so long unless the parent has died.
MAX_ALONE_SECONDS = 600


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


def answer_messages(
    source: IO[bytes], out: IO[bytes], answer: Callable[[Any], Any], *, max_extra_bytes: int
) -> None:
    """Answers messages until the source ends. max_extra_bytes: of address space, on top of what the
    libraries have taken."""
    limit_memory(max_extra_bytes)
    # From here on libraries may write what a client has sent to standard error: that is the log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    write_message(out, {"ready": True})
    while (message := read_message(source)) is not None:
        signal.alarm(MAX_ALONE_SECONDS)
        write_message(out, answer(message))
        signal.alarm(0)


def limit_memory(max_extra_bytes: int) -> None:
    """The host's own limit (`ulimit -v`) may be lower, and cannot be raised."""
    with open("/proc/self/statm") as numbers:
        size = int(numbers.read().split()[0]) * resource.getpagesize()
    wanted, (_, hard) = size + max_extra_bytes, resource.getrlimit(resource.RLIMIT_AS)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
