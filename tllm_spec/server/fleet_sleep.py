"""Several engines sleep and wake together, and one that is started again meanwhile sleeps, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tllm_spec.server.engine_client import EngineClient, in_all
from tllm_spec.server.in_force import SleepState, sleep_in_force

logger = logging.getLogger(__name__)


class FleetSleep:
    """engine_path: an engine's socket. running: the engines that run. Methods wait for them, and
    raise RuntimeError, too, if what is in force cannot be read or written."""

    def __init__(self, engine_path: str, running: Callable[[], Sequence[EngineClient]]) -> None:
        self._in_force = sleep_in_force(engine_path)
        self._running = running

    def sleep(self, level: int) -> list[dict[str, Any]]:
        """As `LLM.sleep`, of all engines."""
        return self._change(lambda engine: engine.sleep(level))

    def wake_up(self, tags: Sequence[str] | None) -> list[dict[str, Any]]:
        """As `LLM.wake_up`."""
        return self._change(lambda engine: engine.wake_up(tags))

    def _change(self, step: Callable[[EngineClient], dict[str, Any]]) -> list[dict[str, Any]]:
        with self._held():
            told = in_all(self._running(), step)
            if told:
                self._in_force.write(state_of(told[0]))
            return told

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the target's weights of all engines are replaced, and none begins to sleep."""
        with self._held() as state:
            yield
            if state is not None:
                self._in_force.write(replace(state, lacks_weights=False))

    def settle(self, engine: EngineClient) -> None:
        """Brings an engine that has connected to what is in force. It is one of those that run."""
        try:
            if self._in_force.read() is not None:
                with self._held() as state:
                    if state is not None:
                        _bring(engine, state)
        except (OSError, RuntimeError) as error:
            logger.error("an engine may be awake while the others sleep: %s", error)

    @contextmanager
    def _held(self) -> Iterator[SleepState | None]:
        try:
            with self._in_force.held() as state:
                yield state
        except OSError as error:
            raise RuntimeError(f"what sleeps is not known: {error}") from error


def _bring(engine: EngineClient, state: SleepState) -> None:
    (own,) = engine.server_info()["internal_states"]
    if state_of(own["sleep"]) != state:
        told = engine.sleep(2 if state.lacks_weights else 1)
        engine.wake_up([tag for tag in told["asleep"] if tag not in state.asleep])


def state_of(told: Mapping[str, Any]) -> SleepState:
    return SleepState(told["asleep"], told["lacks_weights"])
