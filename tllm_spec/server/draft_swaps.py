"""Swaps the draft weights of several engines: all of them swap, or none. The texts of their
requests do not depend on it, so requests go on meanwhile.

What is served is written before and after the engines swap (`DraftInForce`). So whatever ends in
the middle, an engine or the front that asks, all engines come back to what is written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tllm_spec.recording.traffic_folder import take_lock
from tllm_spec.server.engine_client import EngineClient

# Which draft weights the engines of a server have after a swap. It is a file next to their
# sockets: any front may write it, and an engine that is started again reads it.


LOCK_SECONDS = 600.0  # that a swap waits for another one


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
        with self._path.with_suffix(".lock").open("a") as lock:
            take_lock(lock.fileno(), LOCK_SECONDS)
            yield self.read()

    def read(self) -> Served | None:
        """What is served; None before the first swap."""
        return Served(**json.loads(self._path.read_text())) if self._path.exists() else None

    def write(self, served: Served) -> None:
        """Only while it is held."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(asdict(served)))
        os.replace(new, self._path)


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class DraftSwaps:
    """first: the folder that is served before any swap. running: the engines that run. Its methods
    wait for them."""

    def __init__(
        self,
        engine_paths: Sequence[str],
        first: str,
        running: Callable[[], Sequence[EngineClient]],
    ) -> None:
        self._in_force = DraftInForce(engine_paths[0])
        self._first = Served(first, 0, None, 0)
        self._num_engines = len(engine_paths)
        self._running = running

    def swap(self, folder: str, *, keep_cache: bool, force: bool) -> dict[str, Any]:
        """As `LLM.load_draft_weights`. Raises RuntimeError, too, if an engine does not run, or ends
        before all have swapped."""
        try:
            with self._in_force.held() as served:
                served = served or self._first
                return self._swap(served, folder, served.folder, keep_cache=keep_cache, force=force)
        except OSError as error:
            raise RuntimeError(f"no engine has swapped its draft weights: {error}") from error

    def swap_back(self, folder: str) -> None:
        """An engine has found these weights worse than those before. Every front calls this, and
        the first one swaps."""
        try:
            with self._in_force.held() as served:
                if served is not None and served.folder == folder and served.before is not None:
                    self._swap(served, served.before, None, keep_cache=False, force=True)
        except (RuntimeError, ValueError, OSError) as error:
            logger.error("the engines keep the draft weights of %s: %s", folder, error)

    def settle(self, engine: EngineClient) -> None:
        """Brings an engine that has connected to what is served: a front, or the engine, may have
        ended in the middle of a swap."""
        try:
            if self._in_force.read() is not None:
                with self._in_force.held() as served:
                    _keep(served or self._first, engine)
        except OSError as error:
            logger.error("an engine may have other draft weights than the others: %s", error)

    def _swap(
        self, served: Served, folder: str, before: str | None, *, keep_cache: bool, force: bool
    ) -> dict[str, Any]:
        """before: as of `Served`, after the swap."""
        engines = self._running()
        if len(engines) < self._num_engines:
            raise RuntimeError(
                "an engine is being started; draft weights are swapped in all engines or in none"
            )

        def stage(engine: EngineClient) -> dict[str, Any]:
            return engine.swap_step("stage", folder, force or engine is not engines[0])

        version = served.last + 1
        try:
            told = _in_all(engines, stage)[0]
            self._in_force.write(replace(served, last=version))
            _in_all(engines, lambda engine: engine.swap_step("commit", keep_cache, version))
            self._in_force.write(Served(folder, version, before, version))
        except (RuntimeError, ValueError, OSError):
            _in_all(engines, partial(_keep, served))
            raise
        return {"version": version, "folder": folder} | told


def _in_all(
    engines: Sequence[EngineClient], step: Callable[[EngineClient], Answer]
) -> list[Answer]:
    """At the same time. Raises what the first of them raises, once all have ended."""
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return list(threads.map(step, engines))


def _keep(served: Served, engine: EngineClient) -> None:
    try:
        engine.swap_step("keep", served.folder, served.version)
    except (RuntimeError, ValueError) as error:
        if not engine.is_running:
            return  # it reads what is served when it is started again
        logger.error("an engine may not have the draft weights of %s: %s", served.folder, error)
