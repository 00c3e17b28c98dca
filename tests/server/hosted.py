"""Runs the HTTP server over a fake LLM in a thread of the test's process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.http_answers import SECONDS
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.fleet import FleetAdapters
from tllm_spec.server.http_server import HttpServer, Tls
from tllm_spec.server.options import ServerOptions


@dataclass
class Host:
    """A running server. `stop` begins its shutdown, `ended` is set after it."""

    llm: FakeLLM
    options: ServerOptions
    tls: Tls | None = None
    adapters: FleetAdapters | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.address[1]}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(SECONDS)

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self.stop()
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = OpenAIServer(self.llm, MODEL, self.options, adapters=self.adapters)
        self.http = HttpServer(server.app(), self.options, self.tls)
        self._started.set()
        await self.http.serve(self.listener, self._stop, server.close)
        server.close()
        self.ended.set()


@contextmanager
def hosted(
    llm: FakeLLM, options: ServerOptions | None = None, adapters: FleetAdapters | None = None
) -> Iterator[str]:
    """Yields the server's address."""
    host = Host(llm, options or ServerOptions(shutdown_timeout=5), adapters=adapters)
    try:
        yield host.url
    finally:
        host.join()


@contextmanager
def serving(**options: object) -> Iterator[Host]:
    given = {"shutdown_timeout": 0.1, **options}
    host = Host(FakeLLM(), ServerOptions(**given))  # type: ignore[arg-type]  # by name
    try:
        yield host
    finally:
        host.join()


def is_serving(host: Host) -> bool:
    return httpx.get(f"{host.url}/health", timeout=60).status_code == 200
