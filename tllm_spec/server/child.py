"""What a process that the supervisor starts has in common with the others: settings come first,
then a closed connection means stop. All processes have one log format."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
import gc
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tllm_spec.server.wire import new_unpacker, pack

# One log format for all processes of a server and for the libraries in them.


LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s {part}%(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `fields` of a record, given as `extra`, become keys. part: which of
    several processes logs."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self._part = {"part": part} if part else {}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            **self._part,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class LossyFile(io.FileIO):
    """Drops what cannot be written, as on a full disk, and has no buffer that would keep it."""

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def _log_stream() -> TextIO:
    """stderr, which may be a file on a full disk: a log line must not end a request, nor what is
    left of it in a buffer change the exit status."""
    try:
        file = LossyFile(sys.stderr.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # it is no file
        return sys.stderr
    return io.TextIOWrapper(file, "utf-8", errors="backslashreplace", write_through=True)


def configure_logs(level: str, log_format: LogFormat, part: str = "") -> None:
    """level: one of Python's names, in any case. part: of a server with several engines or fronts,
    which of them this process is."""
    handler = logging.StreamHandler(_log_stream())
    text = logging.Formatter(TEXT.format(part=f"{part} " if part else ""))
    handler.setFormatter(JsonFormatter(part) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    # Its messages are written for another command line.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def adopt_transformers_logs() -> None:
    """transformers has a handler and a format of its own."""
    from transformers.utils import logging as library  # heavy

    library.disable_default_handler()
    library.enable_propagation()


# Limits that the host sets for a process (`ulimit`), read before they are met.


WANTED_FILES = 1 << 16
OTHER_FILES = 32  # open files of a front process that are no connections
MIN_FILES = OTHER_FILES + 32


def raise_file_limit() -> int:
    """Raises the limit of open files as far as the system allows, and returns it. Raises ValueError
    for a limit with which nothing can be served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    if limit < WANTED_FILES:
        limit = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < MIN_FILES:
        raise ValueError(
            f"a process may have {limit} open files, and a server needs {MIN_FILES}: raise the "
            "limit (ulimit -n)"
        )
    return limit


def memory_note() -> str:
    """What may explain that a process has ended or had too little memory; often nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"; a process may have {soft >> 20} MiB of address space (ulimit -v)"


ENDS_SOON = pack("ends soon")
FAILED = 1  # exit status
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end the server


@dataclass(frozen=True)
class ChildSettings:
    """Plain values. llm: the arguments of LLM. engine_paths: the engines' Unix sockets. server: of
    `ServerOptions`; tls: of `Tls`, if there are any. number: which of the engines, or of the
    fronts, it is. log_name: what its log lines say of that, where there are several."""

    llm: dict[str, Any]
    served_model_name: str
    engine_paths: list[str]
    log_level: str
    log_format: LogFormat
    server: dict[str, Any]
    tls: dict[str, Any] | None
    number: int = 0
    log_name: str = ""


def engine_process(tensor_parallel_size: int) -> str:
    """What messages call it."""
    return "the engine's process" + (" (rank 0)" if tensor_parallel_size > 1 else "")


class Control:
    """The child's end of its connection to the supervisor. From here on signals have no effect:
    the supervisor says when to end, also where systemd sends SIGTERM to every process."""

    def __init__(self, file_descriptor: int) -> None:
        for number in SIGNALS:
            # Not ignored: the child's own children would inherit that.
            signal.signal(number, lambda *_: None)
        self.socket = socket.socket(fileno=file_descriptor)
        self._messages = self._received()
        self._lock = threading.Lock()
        self._stop: Callable[[], object] = partial(os._exit, FAILED)
        self._announce: Callable[[], object] = self._stop

    def settings(self) -> ChildSettings:
        """Waits for the settings, then sets up what every child needs. Ends the process when
        the supervisor has gone."""
        message = next(self._messages, None)
        if message is None:
            sys.exit(FAILED)
        settings = ChildSettings(**message)
        configure_logs(settings.log_level, settings.log_format, settings.log_name)
        # Lines of the log in place of bars, which several processes would draw over each other.
        os.environ.setdefault("TQDM_DISABLE", "1")
        return settings

    def watch(self) -> None:
        """Makes the process end when the supervisor says so, or has gone: at once while it is being
        loaded, since nothing else could interrupt that."""
        threading.Thread(target=self._watch, name="tllm-control", daemon=True).start()

    def loaded(
        self, stop: Callable[[], object], announce: Callable[[], object] = lambda: None
    ) -> None:
        """Called when loading has ended: `stop` then ends the process. announce: called when the
        supervisor says that it will end. Both are called in a thread."""
        with self._lock:
            self._stop, self._announce = stop, announce

    def _watch(self) -> None:
        with suppress(OSError):
            for _ in self._messages:  # ENDS_SOON
                with self._lock:
                    self._announce()
        with self._lock:
            self._stop()

    def _received(self) -> Iterator[Any]:
        """What the supervisor says, until it has gone."""
        unpacker = new_unpacker()
        while data := self.socket.recv(1 << 16):
            unpacker.feed(data)
            yield from unpacker

    def send(self, kind: str, text: str = "") -> None:
        try:
            self.socket.sendall(pack([kind, text]))
        except OSError:
            return  # the supervisor has ended


def stop_listening(listener: socket.socket) -> None:
    """Refuses new connections at once, in every process that has the socket."""
    with suppress(OSError):  # another process was earlier
        listener.shutdown(socket.SHUT_RDWR)


def freeze_heap() -> None:
    """Excludes the objects made so far from garbage collection. There are hundreds of thousands,
    they live as long as the process, and a full collection would delay requests."""
    gc.collect()
    gc.freeze()
