"""Swaps the draft weights of several engines: all of them swap, or none. The texts of their
requests do not depend on it, so requests go on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tllm_spec.server.draft_in_force import DraftInForce, Served
from tllm_spec.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class DraftSwaps:
    """running: the engines that run. Its methods wait for all of them."""

    def __init__(
        self, engine_paths: Sequence[str], running: Callable[[], Sequence[EngineClient]]
    ) -> None:
        self._in_force = DraftInForce(engine_paths[0])
        self._num_engines = len(engine_paths)
        self._running = running

    def swap(self, folder: str, *, keep_cache: bool, force: bool) -> dict[str, Any]:
        """As `LLM.load_draft_weights`. Raises RuntimeError, too, if an engine does not run, or ends
        before all have swapped."""
        try:
            with self._in_force.held():
                return self._swap(folder, keep_cache=keep_cache, force=force, is_back=False)
        except OSError as error:
            raise RuntimeError(f"no engine has swapped its draft weights: {error}") from error

    def swap_back(self, folder: str) -> None:
        """An engine has found these weights worse than those before. Every front calls this, and
        the first one swaps."""
        try:
            with self._in_force.held() as served:
                if served is not None and served.folder == folder and served.before is not None:
                    self._swap(served.before, keep_cache=False, force=True, is_back=True)
        except (RuntimeError, ValueError, OSError) as error:
            logger.error("the engines keep the draft weights of %s: %s", folder, error)

    def _swap(self, folder: str, *, keep_cache: bool, force: bool, is_back: bool) -> dict[str, Any]:
        engines = self._running()
        if len(engines) < self._num_engines:
            raise RuntimeError(
                "an engine is being started; draft weights are swapped in all engines or in none"
            )
        staged: list[EngineClient] = []

        def stage(engine: EngineClient) -> dict[str, Any]:
            told = engine.swap_step("stage", folder, force or engine is not engines[0])
            staged.append(engine)
            return told

        try:
            told = _in_all(engines, stage)[0]
            done = _in_all(engines, lambda engine: engine.swap_step("commit", keep_cache))
            version = max(each["version"] for each in done)
            before = None if is_back else done[0]["before"]
            self._in_force.write(Served(folder, version, before))
        except (RuntimeError, ValueError, OSError):
            _in_all(staged, _go_back)
            raise
        return {"version": version, "folder": folder} | told


def _in_all(
    engines: Sequence[EngineClient], step: Callable[[EngineClient], Answer]
) -> list[Answer]:
    """At the same time. Raises what the first of them raises, once all have ended."""
    with ThreadPoolExecutor(max(1, len(engines))) as threads:
        return list(threads.map(step, engines))


def _go_back(engine: EngineClient) -> None:
    try:
        engine.swap_step("back")
    except (RuntimeError, ValueError) as error:
        logger.error("an engine may have kept the draft weights of a failed swap: %s", error)
