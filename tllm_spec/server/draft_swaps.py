"""Swaps the draft weights of several engines: all of them swap, or none. The texts of their
requests do not depend on it, so requests go on meanwhile.

What is served is written before and after the engines swap (`DraftInForce`). So whatever ends in
the middle, an engine or the front that asks, all engines come back to what is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tllm_spec.server.draft_in_force import DraftInForce, Served
from tllm_spec.server.engine_client import EngineClient

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
        logger.error("an engine may not have the draft weights of %s: %s", served.folder, error)
