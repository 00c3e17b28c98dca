"""A running `tllm-serve`."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Server:
    """Its model is served as `m`."""

    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def pids(self) -> dict[str, int]:
        """The process ids by name, `engine` and `front`."""
        own, found = self.process.pid, {}
        for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if module := re.search(r"(engine|front)_process", command):
                found[module[1]] = int(pid)
        return found


@contextmanager
def served(model: str, options: dict[str, Any], frontends: int = 1) -> Iterator[Server]:
    """Yields when it is ready. options: of `LLM`."""
    command = [sys.executable, "-m", "tllm_spec.cli.serve", model, "--port", "0"]
    command += ["--frontends", str(frontends), "--served_model_name", "m", "--config", "/dev/stdin"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(yaml.safe_dump(options))
    process.stdin.close()
    log = []
    try:
        for line in process.stderr:
            log.append(line)
            if address := re.search(r"serving m on http://([\d.]+):(\d+)", line):
                break
        else:
            raise RuntimeError("".join(log))
        # The pipe must not fill up.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(process, address[1], int(address[2]))
    finally:
        process.terminate()
        process.wait()
