"""What a process that the supervisor starts has in common with the others: settings come first,
then a closed connection means stop."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Any

from tllm_spec.server.logs import LogFormat, configure_logs
from tllm_spec.server.wire import new_unpacker, pack


@dataclass(frozen=True)
class ChildSettings:
    """Plain values. llm: the arguments of LLM. engine_path: the engine's Unix socket. server: of
    `ServerOptions`; tls: of `Tls`, if there are any."""

    llm: dict[str, Any]
    served_model_name: str
    engine_path: str
    log_level: str
    log_format: LogFormat
    server: dict[str, Any]
    tls: dict[str, Any] | None
    import_path: list[str]


class Control:
    """The child's end of its connection to the supervisor."""

    def __init__(self, file_descriptor: int) -> None:
        self.socket = socket.socket(fileno=file_descriptor)

    def settings(self) -> ChildSettings:
        """Waits for the settings, then sets up what every child needs. Raises EOFError when the
        supervisor has gone."""
        unpacker = new_unpacker()
        while True:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            unpacker.feed(data)
            for message in unpacker:
                settings = ChildSettings(**message)
                sys.path[:] = settings.import_path
                configure_logs(settings.log_level, settings.log_format)
                return settings

    def send(self, kind: str, text: str = "") -> None:
        try:
            self.socket.sendall(pack([kind, text]))
        except OSError:
            return  # the supervisor has gone; nobody is left to be told
