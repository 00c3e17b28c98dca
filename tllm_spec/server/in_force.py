"""What the engines of a server have in force: weights after they were replaced, LoRA adapters, and
what sleeps.

Each is a file next to the engines' sockets: any front may write it, and an engine that is started
again reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tllm_spec.lora_request import AdapterInfo
from tllm_spec.recording.traffic_folder import take_lock

LOCK_SECONDS = 600.0  # that a change waits for another one
Value = TypeVar("Value")


class InForce(Generic[Value]):
    """engine_path: an engine's socket. name: of what it is. made: the value of what JSON has of it.
    Methods raise OSError when the folder has been removed."""

    def __init__(self, engine_path: str, name: str, made: Callable[[Any], Value]) -> None:
        self._path = Path(engine_path).with_name(f"{name}.json")
        self._made = made
        self._known: tuple[tuple[int, int], Value] | None = None  # of which file

    @contextmanager
    def held(self) -> Iterator[Value | None]:
        """As `read`. Waits until no other thread or process holds it, so there is one change at a
        time. Raises TimeoutError, which is an OSError, when that takes too long."""
        with self._path.with_suffix(".lock").open("a") as lock:
            take_lock(lock.fileno(), LOCK_SECONDS)
            yield self.read()

    def read(self) -> Value | None:
        """None before anything was written. The same file is not read twice."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        file = status.st_ino, status.st_mtime_ns
        if self._known is None or self._known[0] != file:
            self._known = file, self._made(json.loads(self._path.read_text()))
        return self._known[1]

    def write(self, value: Value) -> None:
        """Only while it is held."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(value, default=asdict))
        os.replace(new, self._path)


@dataclass(frozen=True)
class ServedWeights:
    """version: of these weights. before: the folder that the last swap replaced; None if that swap
    was one back to older weights. last: the latest number that a swap has had, also one that
    failed: no version has two folders."""

    folder: str
    version: int | str
    before: str | None
    last: int


def weights_in_force(engine_path: str, part: str) -> InForce[ServedWeights]:
    return InForce(engine_path, f"{part}_weights", lambda plain: ServedWeights(**plain))


@dataclass(frozen=True)
class ServedAdapter(AdapterInfo):
    """client: the only one that may use it, by the name of its key; None: all may. content_hash:
    "" before the first engine has loaded it. from_request: whether a request has loaded it."""

    client: str | None = None
    from_request: bool = False

    @classmethod
    def of_folder(cls, name: str, folder: str, **own: Any) -> ServedAdapter:
        """One that no engine has loaded yet."""
        return cls(name, "", 0, folder, **own)


ServedAdapters = Mapping[str, ServedAdapter]  # by name


def adapters_in_force(engine_path: str) -> InForce[ServedAdapters]:
    return InForce(
        engine_path,
        "adapters",
        lambda plain: {name: ServedAdapter(**each) for name, each in plain.items()},
    )


@dataclass(frozen=True)
class SleepState:
    """What sleeps of each engine, and whether the target's weights were dropped and not updated
    since: as `LLM.sleep` tells it."""

    asleep: list[str]
    lacks_weights: bool


def sleep_in_force(engine_path: str) -> InForce[SleepState]:
    return InForce(engine_path, "sleep", lambda plain: SleepState(**plain))
