"""One log format for all processes of a server and for the libraries in them."""

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
