"""CPU time that a front process takes for each increment of a stream.

    python -m benchmarks.front_load [--clients 256] [--rounds 100] [--tokens 1] [--runs 3]
    python -m benchmarks.front_load --route chat --stop END    # chat streams that look for a string

This process is the engine and all the clients. A round sends every stream its next tokens at once,
and the next round waits until all clients have read theirs; so the front's CPU time, which the
kernel counts, does not depend on what else runs. Rates that follow from it are of one front."""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec.child_command import module_command
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.server.child import ChildSettings
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.wire import new_unpacker, pack
from tllm_spec.text.tokenizer import load_tokenizer

MODEL = "zoo:llama"
TEXT = "def size_of(values: list[int]) -> int:\n    return sum(len(each) for each in values)\n"
LIMITS = RequestLimits(2048, (1,), 2048, 3, None)
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
            llm={"model": MODEL}, served_model_name="m", engine_paths=[engine_path],
            log_level="warning", log_format="text", server=asdict(ServerOptions()), tls=None,
        )  # fmt: skip
        self._control.sendall(pack(asdict(settings)))
        self.engine, _ = engines.accept()
        self.engine.sendall(pack(["hello", asdict(LIMITS)]))
        assert self._control.recv(1 << 10) == pack(["ready", ""])

    def close(self) -> None:
        self._control.close()
        self.process.wait()

    def cpu_seconds(self) -> float:
        """The CPU time of all its threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


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
            for kind, numbers, *_ in unpacker:
                self.ids += numbers if kind == "submit" else []

    def read(self, mark: bytes, number: int) -> None:
        """Reads until `mark` has come `number` times."""
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


def increments(options: Options) -> Iterator[Row]:
    own = options.more
    stop = {} if own.stop is None else {"stop": own.stop}
    with TemporaryDirectory() as folder, closing(Front(Path(folder))) as started:
        for _ in range(own.runs):
            cpu, wall = measure(started, own.clients, own.rounds, own.tokens, own.route, stop)
            yield {"tokens": own.tokens, "cpu_us": cpu, "wall_us": wall}


def increments_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [f"{row['cpu_us']:.1f}", f"{row['tokens'] * 1e6 / row['cpu_us']:,.0f}",
         f"{row['wall_us']:.1f}"]
        for row in rows
    ]  # fmt: skip
    return table(("CPU us per increment", "tok/s of a busy front", "wall us per increment"), lines)


SUBJECTS = (Subject("increments", "A front's increments", increments, increments_table),)

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    own = {"clients": 256, "rounds": 100, "tokens": 1, "runs": 3, "route": "completions"}
    sys.exit(main(SUBJECTS, __doc__, **own, stop=None))
