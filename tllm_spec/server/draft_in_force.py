"""Which draft weights the engines of a server have after a swap. It is a file next to their
sockets: any front may write it, and an engine that is started again reads it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

LOCK_SECONDS = 600.0  # that a swap waits for another one
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Served:
    """version: of these weights. before: the folder that the last swap replaced; None if that swap
    was one back to older weights. last: the latest version that a swap has had, also one that
    failed: no version has two folders."""

    folder: str
    version: int
    before: str | None
    last: int


class DraftInForce:
    """engine_path: an engine's socket. Methods raise OSError when its folder has been removed."""

    def __init__(self, engine_path: str) -> None:
        self._path = Path(engine_path).with_name("draft_weights.json")

    @contextmanager
    def held(self) -> Iterator[Served | None]:
        """As `read`. Waits until no other thread or process holds it, so there is one swap at a
        time. Raises TimeoutError, which is an OSError, when that takes too long."""
        deadline = monotonic() + LOCK_SECONDS
        with self._path.with_suffix(".lock").open("a") as lock:
            while not _is_locked(lock.fileno()):
                if monotonic() > deadline:
                    raise TimeoutError(f"another swap has not ended for {LOCK_SECONDS:g} s")
                sleep(POLL_SECONDS)
            yield self.read()

    def read(self) -> Served | None:
        """What is served; None before the first swap."""
        return Served(**json.loads(self._path.read_text())) if self._path.exists() else None

    def write(self, served: Served) -> None:
        """Only while it is held."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(asdict(served)))
        os.replace(new, self._path)


def _is_locked(file_descriptor: int) -> bool:
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
