"""CPU time that a front process takes for each increment of a stream.

    python -m benchmarks.front_load [--clients 256] [--rounds 100] [--tokens 1] [--runs 3]
    python -m benchmarks.front_load --route chat --stop END    # chat streams that look for a string

This process is the engine and all the clients. A round sends every stream its next tokens at once,
and the next round waits until all clients have read theirs; so the front's CPU time, which the
kernel counts, does not depend on what else runs. Rates that follow from it are of one front."""

import argparse
import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.report import table
from benchmarks.streamed_rounds import cpu_seconds
from tllm_spec.child_command import module_command
from tllm_spec.executor.request_limits import Capacity, RequestLimits
from tllm_spec.server.child import ChildSettings
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.wire import new_unpacker, pack, pack_limits
from tllm_spec.text.tokenizer import load_tokenizer

MODEL = "zoo:llama"
TEXT = "def size_of(values: list[int]) -> int:\n    return sum(len(each) for each in values)\n"
LIMITS = RequestLimits(2048, (1,), 2048, 3, None, Capacity(1 << 20, 16, 8, 8192, True))
WARM_ROUNDS = 10
ROUTES = {
    "completions": ("/v1/completions", {"prompt": "a"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
}


class Front:
    """A front process that is ready. `engine` is its connection to the engine."""

    def __init__(self, folder: Path) -> None:
        engine_path = str(folder / "engine")
        engines = socket.socket(socket.AF_UNIX)
        engines.bind(engine_path)
        engines.listen()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._control, theirs = socket.socketpair()
        descriptors = theirs.fileno(), listener.fileno()
        command = [*module_command("tllm_spec.server.front_process"), *map(str, descriptors)]
        self.process = subprocess.Popen(command, pass_fds=descriptors)
        theirs.close()
        listener.close()
        settings = ChildSettings(
            llm={"model": MODEL},
            served_model_name="m",
            engine_path=engine_path,
            log_level="warning",
            log_format="text",
            server=ServerOptions().to_plain(),
            tls=None,
        )
        self._control.sendall(pack(asdict(settings)))
        self.engine, _ = engines.accept()
        self.engine.sendall(pack(["hello", pack_limits(LIMITS)]))
        assert self._control.recv(1 << 10) == pack(["ready", ""])

    def close(self) -> None:
        self._control.close()
        self.process.wait()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)


@contextmanager
def front() -> Iterator[Front]:
    with TemporaryDirectory() as folder:
        started = Front(Path(folder))
        try:
            yield started
        finally:
            started.close()


class Clients:
    """Streams that have begun, and the requests that the engine has received of them."""

    def __init__(self, front: Front, number: int, route: str, more: dict[str, Any]) -> None:
        path, prompt = ROUTES[route]
        body = {"model": "m", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        data = json.dumps(body | prompt | more).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._selector = selectors.DefaultSelector()
        for _ in range(number):
            connection = socket.create_connection(front.address)
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            self._selector.register(connection, selectors.EVENT_READ)
        self._tail: dict[Any, bytes] = {}
        self.ids: list[int] = []
        unpacker = new_unpacker()
        while len(self.ids) < number:
            unpacker.feed(front.engine.recv(1 << 16))
            for message in unpacker:
                self.ids += message[1]

    def read(self, mark: bytes, number: int) -> None:
        """Until `mark` has come so often."""
        while number > 0:
            for key, _ in self._selector.select():
                connection: Any = key.fileobj
                data = connection.recv(1 << 16)
                assert data, "a stream ended early"
                data = self._tail.get(connection, b"") + data
                number -= data.count(mark)
                self._tail[connection] = data[data.rfind(mark) + len(mark) :][1 - len(mark) :]

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # a socket
        self._selector.close()


def measure(
    front: Front, clients: int, rounds: int, tokens: int, route: str, more: dict[str, Any]
) -> tuple[float, float]:
    """Microseconds of CPU and of wall clock for an increment."""
    ids = load_tokenizer(MODEL).encode(TEXT, add_special_tokens=False)
    text = cycle(ids)
    streams = Clients(front, clients, route, more)
    cpu = wall = 0.0
    for index in range(-WARM_ROUNDS, rounds):
        if index == 0:
            cpu, wall = front.cpu_seconds(), time.monotonic()
        new = list(islice(text, tokens))
        front.engine.sendall(pack(["responses", clients, [[each, new] for each in streams.ids]]))
        streams.read(b"data: {", clients)
    cpu, wall = front.cpu_seconds() - cpu, time.monotonic() - wall
    end = {"cached_tokens": 0, "first_scheduled_time": 0.0, "first_token_time": 0.0}
    end |= {"finish_reason": "length", "stop_reason": None, "error": None, "speculative": None}
    front.engine.sendall(pack(["responses", 0, [[each, [], end] for each in streams.ids]]))
    streams.read(b"[DONE]", clients)
    streams.close()
    scale = 1e6 / (clients * rounds)
    return cpu * scale, wall * scale


def lines(found: Sequence[tuple[float, float]], tokens: int) -> list[str]:
    header = ("run", "CPU us per increment", "tok/s of a busy front", "wall us per increment")
    rows = [
        [str(run), f"{cpu:.1f}", f"{tokens * 1e6 / cpu:,.0f}", f"{wall:.1f}"]
        for run, (cpu, wall) in enumerate(found, start=1)
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1, help="new tokens of a stream a round")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--route", choices=tuple(ROUTES), default="completions")
    parser.add_argument("--stop")
    args = parser.parse_args()
    more = {} if args.stop is None else {"stop": args.stop}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with front() as started:
        found = [
            measure(started, args.clients, args.rounds, args.tokens, args.route, more)
            for _ in range(args.runs)
        ]
    print("\n".join(lines(found, args.tokens)))


if __name__ == "__main__":
    main()
