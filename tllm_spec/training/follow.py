"""`tllm-train head --follow`: a head is trained again and again on the newest recorded texts of a
target that changes, and swapped into the engine that serves it."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tllm_spec.recording.traffic_folder import states_files_of
from tllm_spec.training.head_run import HeadOptions, run_head
from tllm_spec.training.trainer import METRICS

MIN_NEW = 16  # texts that no turn has read, with which the next one begins
NEWEST = 512
POLL_SECONDS = 1.0
SWAP_SECONDS = 600.0


class Follower:
    """options: of each turn, whose `data` is the traffic. The first begins with the head `start`,
    each other one with the head before it. swap: serves the head of a folder. newest: how many
    texts a turn reads."""

    def __init__(
        self, options: HeadOptions, swap: Callable[[Path], object], newest: int = NEWEST
    ) -> None:
        if options.start is None:
            raise ValueError("--follow needs --init: the head that serves, which can be swapped")
        if "WORLD_SIZE" in os.environ:
            raise ValueError("--follow trains in one process: start it without torchrun")
        self._options, self._swap, self._newest = options, swap, newest
        earlier = [int(each.name) for each in options.output.glob("[0-9]*")]
        self._turn, self._read = max(earlier, default=0), set[Path]()

    def wait(self) -> None:
        """Returns when there are enough new texts with hidden states."""
        while len({*states_files_of(self._options.data)} - self._read) < MIN_NEW:
            time.sleep(POLL_SECONDS)

    def turn(self) -> None:
        """Trains on the newest texts, and swaps if the held-out loss has fallen. The heads of the
        last two turns stay. Only texts whose hidden states were recorded are read: the weights
        that wrote them may be none that the trainer has."""
        self._turn += 1
        output = self._options.output / f"{self._turn:06}"
        files = states_files_of(self._options.data)
        self._read = {*files}
        with TemporaryDirectory() as texts:  # the recorder drops old files at any time
            for file in files[-self._newest :]:
                with suppress(FileNotFoundError):
                    shutil.copy(file, texts)
            run_head(replace(self._options, data=Path(texts), output=output))
        self._options = replace(self._options, start=str(output))
        if json.loads((output / METRICS).read_text(encoding="utf-8"))["step"]:
            self._swap(output)
        shutil.rmtree(self._options.output / f"{self._turn - 2:06}", ignore_errors=True)


def follow(
    options: HeadOptions, newest: int, turns: int | None, url: str | None, key: str | None
) -> None:
    """turns: None: until it is interrupted. url: of the server whose head is swapped; None: none
    is. key: its operator's."""

    def swap(folder: Path) -> None:
        if url is not None:
            _swap_over_http(url, key, folder)

    follower, number = Follower(options, swap, newest), 0
    while turns is None or number < turns:
        follower.wait()
        follower.turn()
        number += 1


def _swap_over_http(url: str, key: str | None, folder: Path) -> None:
    """The held-out loss has judged the head, so nothing is replayed. What the server refuses is a
    warning: it serves the head before."""
    body = json.dumps({"folder": str(folder.resolve()), "force": True}).encode()
    headers = {"Content-Type": "application/json"}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    request = Request(f"{url.rstrip('/')}/draft_model", body, headers)
    try:
        with urlopen(request, timeout=SWAP_SECONDS) as answer:
            print(f"Served: {answer.read().decode()}", flush=True)
    except HTTPError as error:
        print(f"Warning: not served: {error.read().decode()}", file=sys.stderr)
