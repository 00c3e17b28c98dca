"""Loads and unloads LoRA adapters in all engines of a server, or in none, while requests run. A
request keeps the version that it began with.

What is served is written once all engines have it (`in_force`). So whatever ends in the middle, an
engine or the front that asks, all engines come back to what is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tllm_spec.server.engine_client import EngineClient, in_all
from tllm_spec.server.in_force import InForce, ServedAdapter, ServedAdapters

logger = logging.getLogger(__name__)


class Adapters:
    """running: the engines that run. Its methods wait for them."""

    def __init__(
        self, in_force: InForce[ServedAdapters], running: Callable[[], Sequence[EngineClient]]
    ) -> None:
        self._in_force, self._running = in_force, running

    def served(self) -> ServedAdapters:
        """By name. Does not wait."""
        return self._in_force.read() or {}

    def load(
        self, wanted: ServedAdapter, root: str, *, replaces: bool = False, most: int | None = None
    ) -> ServedAdapter:
        """Loads an adapter, whose files must lie below the root. replaces: it may have the name of
        a loaded one, whose client it keeps unless it names another. most: where so many are loaded,
        one that a request has loaded and that is not in use makes room; None: none does. Raises
        ValueError for a name in use and for a folder that does not fit, RuntimeError if an engine
        does not answer. Then nothing has changed, but one may have made room."""
        with self._held() as served:
            old = served.get(wanted.name)
            if old is not None and wanted.from_request:
                return old  # another front has been faster
            if old is not None and not replaces:
                raise ValueError(
                    f"lora_name = {wanted.name!r} is in use; load_inplace = true replaces it"
                )
            engines = self._running()
            try:
                given = "stage_adapter", wanted.name, wanted.folder, root
                told = in_all(engines, lambda engine: engine.swap_step(*given))
                if not told or any(each != told[0] for each in told):
                    raise RuntimeError("the engines have not read the same adapter")
                client = wanted.client or (old.client if old else None)
                own = {name: told[0][name] for name in ("content_hash", "rank")}
                made = replace(wanted, client=client, **own)
                if (room := self._with_room(served, most)) is not served:
                    self._in_force.write(served := room)  # from here on requests load it again
                after = {**served, wanted.name: made}
                in_all(engines, partial(_keep, after))
                self._in_force.write(after)
            except (RuntimeError, ValueError, OSError) as error:
                in_all(engines, partial(_keep_if_possible, served))
                if isinstance(error, ValueError):  # a client sees names, no paths
                    named = str(error).replace(wanted.folder, wanted.name)
                    raise ValueError(named.replace(root, "--lora_root")) from error
                raise
        return made

    def _with_room(self, served: ServedAdapters, most: int | None) -> ServedAdapters:
        if most is None or len(served) < most:
            return served
        idle = [each.swap_step("idle_adapters")["names"] for each in self._running()]
        loaded = (name for name, each in served.items() if each.from_request)
        leaving = {name for name in loaded if all(name in other for other in idle)}
        if (found := next((name for name in idle[0] if name in leaving), None)) is None:
            return served
        return {name: each for name, each in served.items() if name != found}

    def unload(self, name: str) -> None:
        """Requests that run keep it until they end. Raises LookupError for a name that is not
        loaded."""
        with self._held() as served:
            left = {other: each for other, each in served.items() if other != name}
            if len(left) == len(served):
                raise LookupError(name)
            self._in_force.write(left)
            in_all(self._running(), partial(_keep_if_possible, left))

    def settle(self, engine: EngineClient, joined: Callable[[], None] = lambda: None) -> None:
        """Brings an engine that has connected to what is served: a front may have ended in the
        middle of a change. joined: called before the next change."""
        with self._held() as served:
            _keep_if_possible(served, engine)
            joined()

    @contextmanager
    def _held(self) -> Iterator[ServedAdapters]:
        try:
            with self._in_force.held() as served:
                yield served or {}
        except OSError as error:
            raise RuntimeError(f"adapters are not changed: {error}") from error


def _keep(served: ServedAdapters, engine: EngineClient) -> dict[str, Any]:
    entries = [[each.name, each.folder, each.content_hash] for each in served.values()]
    return engine.swap_step("keep_adapters", entries)


def _keep_if_possible(served: ServedAdapters, engine: EngineClient) -> None:
    try:
        _keep(served, engine)
    except (RuntimeError, ValueError) as error:
        if engine.is_running:  # otherwise it reads what is served when it is started again
            logger.error("an engine may have other adapters than the others: %s", error)
