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


@dataclass(frozen=True)
class Served:
    """version: the number of swaps. before: the folder that the last swap replaced; None if that
    swap was one back to older weights."""

    folder: str
    version: int
    before: str | None


class DraftInForce:
    """engine_path: an engine's socket. Raises OSError when its folder has been removed."""

    def __init__(self, engine_path: str) -> None:
        self._path = Path(engine_path).with_name("draft_weights.json")

    @contextmanager
    def held(self) -> Iterator[Served | None]:
        """What is served; None before the first swap. Waits until no other thread or process holds
        it: so there is one swap at a time, whose end an engine waits for that starts meanwhile."""
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Served(**json.loads(self._path.read_text())) if self._path.exists() else None

    def write(self, served: Served) -> None:
        """Only while it is held."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(asdict(served)))
        os.replace(new, self._path)
