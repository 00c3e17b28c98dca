"""Two replicas behind a proxy with the configuration of `deploy/` are restarted one by one under
load."""

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_deploy_files import DEPLOY, nginx_options, tool
from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import MODEL, ServedProcess

NUM_CLIENTS = 4
BODY = {"model": MODEL, "prompt": "import os", "max_tokens": 40, "ignore_eos": True}


def free_ports(number: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in with_ports]
    for each in with_ports:
        each.close()
    return ports


def with_ports(text: str, ports: list[int]) -> str:
    for shown, port in zip((8000, 8001, 8002), ports, strict=True):
        text = text.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{port}")
    return text


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


class Load:
    """Clients that send requests until the end, every other one streamed. `lost`: what was not
    answered in full."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_answered = 0
        self.lost: list[str] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self) -> None:
        number = self.num_answered + 5 * NUM_CLIENTS
        wait_for(lambda: self.num_answered >= number)

    def _run(self) -> None:
        with httpx.Client(timeout=SECONDS) as client:
            while not self._ends.is_set():
                for streamed in (False, True):
                    self._ask(client, streamed=streamed)

    def _ask(self, client: httpx.Client, *, streamed: bool) -> None:
        try:
            answer = client.post(f"{self.url}/v1/completions", json=BODY | {"stream": streamed})
        except httpx.HTTPError as error:
            self.lost.append(repr(error))
            return
        texts = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        is_whole = texts[-1:] == ["[DONE]"] if streamed else '"finish_reason"' in answer.text
        if answer.status_code != 200 or not is_whole:
            self.lost.append(f"{answer.status_code} {answer.text}")
        self.num_answered += 1


@pytest.mark.slow
def test_a_rolling_restart_behind_haproxy_loses_no_request(tmp_path: Path) -> None:
    ports = free_ports(3)
    config = tmp_path / "haproxy.cfg"
    config.write_text(with_ports((DEPLOY / "haproxy.cfg").read_text(encoding="utf-8"), ports))

    @contextmanager
    def replica(port: int) -> Iterator[ServedProcess]:
        folder = tmp_path / str(port)
        folder.mkdir(exist_ok=True)
        flags = ("--port", str(port), "--drain_delay", "5", "--shutdown_timeout", "300")
        with ServedProcess(folder, *flags) as served:
            assert served.url
            yield served

    url = f"http://127.0.0.1:{ports[0]}"
    proxy = tool("haproxy"), "-f", str(config)
    with running(*proxy), replica(ports[1]) as one, replica(ports[2]) as two:
        wait_for(lambda: is_up(url))
        with ExitStack() as at_end:
            load = at_end.enter_context(Load(url))
            load.wait_for_more()
            assert one.end(signal.SIGTERM) == 0
            one_again = at_end.enter_context(replica(ports[1]))
            load.wait_for_more()
            assert two.end(signal.SIGTERM) == 0
            load.wait_for_more()
            load.end()
        assert load.lost == [] and load.num_answered > 60
        assert all("POST" in each.text for each in (one, two, one_again))


def is_up(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


@pytest.mark.slow
def test_nginx_passes_a_stream_on_as_it_comes(tmp_path: Path) -> None:
    ports = free_ports(3)
    text = with_ports((DEPLOY / "nginx.conf").read_text(encoding="utf-8"), ports)
    options = nginx_options(tmp_path, text)
    url = f"http://127.0.0.1:{ports[0]}/v1/completions"
    body = BODY | {"max_tokens": 1500, "stream": True}
    with (
        ServedProcess(tmp_path, "--port", str(ports[1])) as served,
        running(tool("nginx"), "-g", "daemon off;", *options),
    ):
        assert is_up(served.url)
        wait_for(lambda: is_up(f"http://127.0.0.1:{ports[0]}"))
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            state = httpx.get(f"{served.url}/server_info").json()["internal_states"][0]
            assert state["num_requests_running"] == 1
