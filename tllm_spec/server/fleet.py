"""What all engines of a server share: draft weights, the target's weights, LoRA adapters, a pause
and what sleeps. All engines change, or none, while requests run.

What is in force is a file next to the engines' sockets: any front may write it, and an engine that
is started again reads it. It is written before and after the engines change. So whatever ends in
the middle, an engine or the front that asks, all engines come back to what is written."""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from tllm_spec.lora_request import AdapterInfo
from tllm_spec.outputs import FIRST_VERSION
from tllm_spec.recording.traffic_folder import take_lock
from tllm_spec.request_errors import AdaptersInUse
from tllm_spec.server.engine_client import EngineClient, in_all

logger = logging.getLogger(__name__)

LOCK_SECONDS = 600.0  # that a change waits for another one
Value = TypeVar("Value")
Answers = list[dict[str, Any]]  # what a step of each engine returns


class FleetState(ABC, Generic[Value]):
    """engine_path: an engine's socket. running: the engines that run, also those that do not serve
    before `settle` has ended. min_engines: how many must run for a change. Methods wait for them,
    and raise RuntimeError if nothing can be changed."""

    part: ClassVar[str]  # of an engine, which has the steps

    def __init__(
        self,
        engine_path: str,
        running: Callable[[], Sequence[EngineClient]] = lambda: (),
        min_engines: int = 1,
    ) -> None:
        self._path = Path(engine_path).with_name(f"{self.part}.json")
        self._running, self._min_engines = running, min_engines
        self._known: tuple[tuple[int, int], Value] | None = None  # of which file

    @abstractmethod
    def made(self, plain: Any) -> Value:
        """What is in force, from its JSON; None: before any change."""

    def read(self) -> Value | None:
        """None before anything was written. The same file is not read twice."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        file = status.st_ino, status.st_mtime_ns
        if self._known is None or self._known[0] != file:
            self._known = file, self.made(json.loads(self._path.read_text()))
        return self._known[1]

    def write(self, value: Value) -> None:
        """Called only while it is held."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(value, default=asdict))
        os.replace(new, self._path)

    def served(self) -> Value:
        """What is in force. Does not wait."""
        found = self.read()
        return self.made(None) if found is None else found

    @contextmanager
    def held(self) -> Iterator[Value]:
        """What is in force. No other thread or process changes it before the block ends."""
        try:
            with self._path.with_suffix(".lock").open("a") as lock:
                take_lock(lock.fileno(), LOCK_SECONDS)
                yield self.served()
        except OSError as error:
            raise RuntimeError(f"the engines stay as they are ({self.part}): {error}") from error

    def _change(
        self,
        stage: Callable[[EngineClient], dict[str, Any]],
        values: Callable[[Answers], tuple[Value, Value]],
    ) -> tuple[Answers, Answers]:
        """Called only while it is held. stage: has an engine check and load what is new. values:
        what is in force until all engines serve that, and then, by their answers to it. Returns the
        answers of both steps. Raises, too, what a step raises, or RuntimeError if an engine does
        not run, or ends before all have changed."""
        engines = self._running()
        if len(engines) < self._min_engines:
            raise RuntimeError(f"an engine is being started; {self.part}: all change, or none")
        try:
            staged = in_all(engines, stage)
            before, after = values(staged)
            self.write(before)
            kept = in_all(engines, partial(self._keep, after))
            self.write(after)
        except (RuntimeError, ValueError, OSError):
            self._bring(engines)
            raise
        return staged, kept

    def settle(self, engine: EngineClient) -> None:
        """Brings an engine that has connected to what is in force: a front, or the engine, may have
        ended in the middle of a change. The engine takes part in the next change."""
        try:
            with self.held():
                if self.read() is not None:
                    self._bring([engine])
        except (OSError, RuntimeError) as error:
            logger.error("an engine may be unlike the others (%s): %s", self.part, error)

    def _bring(self, engines: Sequence[EngineClient]) -> None:
        """Brings engines to what is in force, if they can answer."""

        def bring(engine: EngineClient) -> None:
            try:
                self._keep(served, engine)
            except (RuntimeError, ValueError) as error:
                if engine.is_running:  # others read it when they are started again
                    logger.error("an engine may be unlike the others (%s): %s", self.part, error)

        served = self.served()
        in_all(engines, bring)

    def _keep(self, served: Value, engine: EngineClient) -> dict[str, Any]:
        return engine.step(self.part, "keep", *self._plain(served))

    @abstractmethod
    def _plain(self, served: Value) -> Sequence[Any]:
        """Arguments of the engine's step `keep`."""


@dataclass(frozen=True)
class ServedWeights:
    """version: of these weights. before: the folder that the last swap replaced; None if that swap
    was one back to older weights. last: the latest number that a swap has had, also one that
    failed: no version has two folders."""

    folder: str
    version: int | str
    before: str | None
    last: int


class FleetWeights(FleetState[ServedWeights]):
    """Weights of one part of the model, in all engines. folder: has the first ones."""

    first_version: ClassVar[int | str]

    def __init__(
        self,
        engine_paths: Sequence[str],
        folder: str = "",
        running: Callable[[], Sequence[EngineClient]] = lambda: (),
    ) -> None:
        super().__init__(engine_paths[0], running, len(engine_paths))
        self._folder = folder

    def made(self, plain: Any) -> ServedWeights:
        first = ServedWeights(self._folder, self.first_version, None, 0)
        return first if plain is None else ServedWeights(**plain)

    def _plain(self, served: ServedWeights) -> Sequence[Any]:
        return served.folder, served.version

    def _replace(
        self, served: ServedWeights, new: ServedWeights, stage: Callable[[EngineClient], Any]
    ) -> tuple[Answers, Answers]:
        return self._change(stage, lambda answers: (replace(served, last=new.last), new))


class FleetDraft(FleetWeights):
    """Draft weights. The texts of requests do not depend on them."""

    part, first_version = "draft", 0

    def swap(self, folder: str, *, keep_cache: bool, force: bool) -> dict[str, Any]:
        """As `LLM.load_draft_weights`."""
        with self.held() as served:
            return self._swap(served, folder, served.folder, keep_cache=keep_cache, force=force)

    def swap_back(self, folder: str) -> None:
        """An engine has found these weights worse than those before. Every front calls this, and
        the first one swaps."""
        try:
            with self.held() as served:
                if served.folder == folder and served.before is not None:
                    self._swap(served, served.before, None, keep_cache=False, force=True)
        except (RuntimeError, ValueError) as error:
            logger.error("the engines keep the draft weights of %s: %s", folder, error)

    def _swap(
        self,
        served: ServedWeights,
        folder: str,
        before: str | None,
        *,
        keep_cache: bool,
        force: bool,
    ) -> dict[str, Any]:
        """before: as of `ServedWeights`, after the swap. The first engine tries the weights."""
        version, tries = served.last + 1, self._running()[:1]

        def stage(engine: EngineClient) -> dict[str, Any]:
            is_forced = force or engine not in tries
            return engine.step(self.part, "stage", folder, version, keep_cache, is_forced)

        new = ServedWeights(folder, version, before, version)
        (tried, *_), _ = self._replace(served, new, stage)
        return {"version": version, "folder": folder} | tried


class FleetTarget(FleetWeights):
    """The target's weights, whose versions are names."""

    part, first_version = "target", FIRST_VERSION

    def update(self, folder: str, version: str | None, part: str, running: str) -> dict[str, Any]:
        """As `LLM.update_weights`, of a folder."""
        begin = monotonic()
        with self.held() as served:
            number = served.last + 1
            new = ServedWeights(folder, version or str(number), served.folder, number)
            own = "stage", folder, new.version, part, running
            _, answers = self._replace(served, new, lambda engine: engine.step(self.part, *own))
        stopped = max(each["result"] for each in answers)
        staged = monotonic() - begin - stopped
        return {"version": new.version, "staged_seconds": staged, "stopped_seconds": stopped}


@dataclass(frozen=True)
class SleepState:
    """What sleeps of each engine, whether the target's weights were dropped and not updated since,
    both as in the answer of `LLM.sleep`, and the mode of a pause."""

    asleep: list[str] = field(default_factory=list)
    lacks_weights: bool = False
    pause_mode: str | None = None


class FleetSleep(FleetState[SleepState]):
    """What sleeps of each engine, and their pause."""

    part = "sleep"

    def made(self, plain: Any) -> SleepState:
        return SleepState(**(plain or {}))

    def sleep(self, level: int) -> Answers:
        """As `LLM.sleep`, of all engines."""
        return self._changed(lambda engine: engine.sleep(level))

    def wake_up(self, tags: Sequence[str] | None) -> Answers:
        """As `LLM.wake_up`."""
        return self._changed(lambda engine: engine.wake_up(tags))

    def pause(self, mode: str) -> None:
        """As `LLM.pause`."""
        self._changed(lambda engine: engine.pause(mode))

    def resume(self) -> None:
        """As `LLM.resume`. First ends a pause that waits, since it holds what is in force."""
        with suppress(RuntimeError):  # of an engine that has ended
            in_all(self._running(), EngineClient.resume)
        with self.held() as served:
            self.write(replace(served, pause_mode=None))
            self._bring(self._running())

    def _changed(self, step: Callable[[EngineClient], dict[str, Any]]) -> Answers:
        """The step itself returns what is in force after it: there is nothing to stage."""
        with self.held() as served:

            def after(answers: Answers) -> tuple[SleepState, SleepState]:
                own = {name: answers[0][name] for name in vars(served) if name in answers[0]}
                return (replace(served, **own),) * 2

            return self._change(step, after)[0]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the target's weights of all engines are replaced, and none begins to sleep. If
        that fails, engines that lacked weights before lack them again."""
        with self.held() as served:
            try:
                yield
                self.write(replace(served, lacks_weights=False))
            finally:
                self._bring(self._running())

    def _keep(self, served: SleepState, engine: EngineClient) -> dict[str, Any]:
        if served.pause_mode is None:
            engine.resume()  # a pause may wait for requests, and the next step for it
        return super()._keep(served, engine)

    def _plain(self, served: SleepState) -> Sequence[Any]:
        return served.asleep, served.lacks_weights, served.pause_mode


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


class FleetAdapters(FleetState[ServedAdapters]):
    """LoRA adapters, by name. A request keeps the version that it began with."""

    part = "adapters"

    def made(self, plain: Any) -> ServedAdapters:
        return {name: ServedAdapter(**each) for name, each in (plain or {}).items()}

    def publish(self, infos: Sequence[AdapterInfo]) -> None:
        """Says what an engine has that is about to serve, if it is the first one. Raises ValueError
        if it has not read what the others have."""
        with self.held() as served:
            if self.read() is None:
                self.write({each.name: ServedAdapter(**asdict(each)) for each in infos})
            for each in infos:
                if each.name in served:
                    each.check_unchanged(served[each.name].content_hash)

    def load(
        self, wanted: ServedAdapter, root: str, *, replaces: bool = False, most: int | None = None
    ) -> ServedAdapter:
        """Loads an adapter, whose files must lie below the root. replaces: it may have the name of
        a loaded one, whose client it keeps unless it names another. most: where so many are loaded,
        one that a request has loaded and that is not in use makes room; None: none does. Raises
        ValueError for a name in use and for a folder that does not fit, AdaptersInUse, RuntimeError
        if an engine does not answer. Then nothing has changed, but one may have made room."""
        with self.held() as served:
            old = served.get(wanted.name)
            if old is not None and wanted.from_request:
                return old  # another front has been faster
            if old is not None and not replaces:
                raise ValueError(
                    f"lora_name = {wanted.name!r} is in use; load_inplace = true replaces it"
                )

            def after(answers: Answers) -> tuple[ServedAdapters, ServedAdapters]:
                if any(each != answers[0] for each in answers):
                    raise RuntimeError("the engines have not read the same adapter")
                client = wanted.client or (old.client if old else None)
                room = self._with_room(served, most)  # from here on requests load it again
                return room, {**room, wanted.name: replace(wanted, client=client, **answers[0])}

            own = "stage", wanted.name, wanted.folder, root
            try:
                self._change(lambda engine: engine.step(self.part, *own), after)
            except ValueError as error:  # a client sees names, no paths
                named = str(error).replace(wanted.folder, wanted.name)
                raise ValueError(named.replace(root, "--lora_root")) from error
            return self.served()[wanted.name]

    def _with_room(self, served: ServedAdapters, most: int | None) -> ServedAdapters:
        if most is None or len(served) < most:
            return served
        loaded = {name for name, each in served.items() if each.from_request}
        idle = [each.step(self.part, "idle")["names"] for each in self._running()]
        if not (loaded and idle):
            return served
        leaving = loaded.intersection(*idle)
        if (found := next((name for name in idle[0] if name in leaving), None)) is None:
            raise AdaptersInUse(
                f"max_cpu_loras = {most} adapters are loaded, and requests use those that could "
                "make room"
            )
        return {name: each for name, each in served.items() if name != found}

    def unload(self, name: str) -> None:
        """Requests that run keep it until they end. Raises LookupError for a name that is not
        loaded."""
        with self.held() as served:
            if name not in served:
                raise LookupError(name)
            self.write({other: each for other, each in served.items() if other != name})
            self._bring(self._running())

    def _plain(self, served: ServedAdapters) -> Sequence[Any]:
        return ([[each.name, each.folder, each.content_hash] for each in served.values()],)
