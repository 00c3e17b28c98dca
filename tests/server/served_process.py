"""`tllm-serve` as a process of its own."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.server.http_answers import SECONDS, wait_for

ROOT = Path(__file__).parents[2]
MODEL = "zoo:llama"
RUN = "from tllm_spec.cli.serve import main; main()"
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_batch_size": 4,
    "guided_decoding_backend": None,  # its process would take time of a processor
    "kv_cache_config": {"max_tokens": 4096},
}
LONG = {"model": MODEL, "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
MEDIUM = LONG | {"max_tokens": 200}
SHORT = {"model": MODEL, "prompt": "a", "max_tokens": 3}


class ServedProcess:
    """Use it in `with`: at the end it is killed if it still runs. `log` grows while it runs.
    `code`: Python that runs the command. `cwd`: its working folder."""

    def __init__(
        self, folder: Path, *flags: str, code: str = RUN, cwd: Path = ROOT, **options: Any
    ) -> None:
        path = folder / "options.yaml"
        path.write_text(json.dumps(OPTIONS | options))  # JSON is YAML, too
        command = [sys.executable, "-c", code, MODEL, "--port", "0", "--config", str(path), *flags]
        self.process = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> "ServedProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    @property
    def text(self) -> str:
        return "".join(self.log)

    @property
    def url(self) -> str:
        """Waits until it serves."""
        found: list[str] = []

        def has_url() -> bool:
            found.extend(re.findall(r"serving \S+ on (http[\w:/.]+)", self.text))
            assert self.process.poll() is None, self.text
            return bool(found)

        wait_for(has_url)
        return found[0]

    def pids(self, module: str) -> list[int]:
        """The ids of its child processes that run the module."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [int(pid) for pid in children if module in _command_of(pid)]

    def end(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(timeout=SECONDS)
        self._reader.join(timeout=SECONDS)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))


def is_running(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def complete(url: str) -> int:
    return httpx.post(f"{url}/v1/completions", json=SHORT, timeout=SECONDS).status_code


def _command_of(pid: str) -> str:
    """Empty if the process has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
