"""How a running engine changes, between two rounds and on all of its ranks. It pauses and sleeps
(`LLM.pause`, `LLM.resume`, `LLM.sleep`, `LLM.wake_up`), and one of several replaces weights in two
steps, so that all of them do or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, ClassVar, TypeVar

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.draft_weights import DraftWeights
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.target_weights import TargetWeights, WeightsTorn
from tllm_spec.executor.worker import Worker
from tllm_spec.request_errors import PAUSE_MODES, REFUSING_MODES

Result = TypeVar("Result")


def calls_of(executor: PyExecutor) -> dict[str, Callable[..., Any]]:
    """What rank 0 announces and every rank does, by name."""
    parts = executor.parts

    def resume() -> None:
        executor.is_paused = False

    def replace(part: str, folder: str, load: Sequence[Any], **options: Any) -> Any:
        weights, replaced = replaceable(executor, part)
        assert weights is not None
        return replaced(weights.stage_together(folder, *load), **options)

    calls: dict[str, Callable[..., Any]] = {
        "pause": executor.pause,
        "resume": resume,
        "sleep": executor.sleep,
        "wake_up": parts.sleep.wake_up,
        "replace": replace,
    }
    if (adapters := parts.adapters) is not None:
        calls |= {"load_adapter": adapters.load_together, "unload_adapter": adapters.remove}
    return calls


def replaceable(
    executor: PyExecutor, part: str
) -> tuple[DraftWeights | TargetWeights | None, Callable[..., Any]]:
    """The weights of "draft" or "target", and what replaces them by those that are staged. It
    returns the version of draft weights, or for how many seconds no round ran."""
    if part == "draft":
        return executor.parts.draft_weights, executor.swap_draft
    return executor.parts.target_weights, executor.replace_weights


class RankCalls:
    """Calls between two rounds, from any thread but the executor's."""

    def __init__(self, executor: PyExecutor, worker: Worker) -> None:
        self.executor, self.worker = executor, worker
        self._calls = calls_of(executor)

    @property
    def are_several(self) -> bool:
        """Whether there are other ranks."""
        return len(self.executor.parts.ranks) > 1

    def __call__(self, name: str, /, **arguments: Any) -> Any:
        """Makes a call of `calls_of` on all ranks. Returns rank 0's result."""
        return self.here(lambda: self.announced(name, **arguments))

    def announced(self, name: str, /, **arguments: Any) -> Any:
        """The same in the executor's thread."""
        self.executor.parts.queue.announce(name, **arguments)
        return self._calls[name](**arguments)

    def here(self, function: Callable[[], Result]) -> Result:
        """Calls a function on this rank alone."""
        try:
            return self.worker.call(function)
        except WeightsTorn as error:  # no round has run since
            self.worker.fail(str(error))
            raise


class Pausing:
    """cancel_all: cancels the requests that there are. report: gets the mode of a pause that
    begins, and None when it has ended, in the executor's thread. reload: loads the target's weights
    again, which `keep` may need."""

    def __init__(
        self,
        calls: RankCalls,
        cancel_all: Callable[[], None],
        report: Callable[[str | None], None] = lambda mode: None,
        reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._calls, self._cancel_all, self._report = calls, cancel_all, report
        self._reload = reload
        self.mode: str | None = None
        self._over = Event()  # is set when the latest pause need not wait any more

    def pause(self, mode: str) -> None:
        """As `LLM.pause`. It does nothing more once another pause or `resume` has begun."""
        if mode == self.mode and self._over.is_set():  # nothing runs, perhaps since it sleeps
            return
        self._check(mode)
        calls, over = self._calls, self._begin(mode)
        if mode == "abort":
            self._cancel_all()
        if mode == "wait":
            calls("resume")  # from another mode, in which requests stand still
        if mode in REFUSING_MODES:
            calls.worker.set_when_idle(over)
            over.wait()
        self._stop(over)

    def _begin(self, mode: str) -> Event:
        over = Event()
        self._calls.here(lambda: self._set(mode, over))
        return over

    def _stop(self, over: Event) -> None:
        def stop() -> None:
            if self._over is over:
                self._calls.announced("pause", retract=self.mode == "retract")

        self._calls.here(stop)

    def resume(self) -> None:
        """As `LLM.resume`."""
        self._calls.here(self.resume_now)

    def resume_now(self) -> None:
        """The same in the executor's thread."""
        self._set(None, Event())
        self._calls.announced("resume")

    def close(self) -> None:
        """Releases the models when no call comes any more. `mode` stays."""
        del self._calls

    def _set(self, mode: str | None, over: Event) -> None:
        self._over.set()
        self.mode, self._over = mode, over
        self._report(mode)

    def _check(self, mode: str) -> None:
        """Raises ValueError for a mode that is not known, or that cannot be now."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode = {mode!r}; it must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait" and self._calls.executor.parts.sleep.holds_rounds:
            raise ValueError(
                "mode = 'wait': no request can be finished while the engine sleeps or lacks its "
                "weights; accepted are abort, keep and retract"
            )

    def sleep(self, level: int) -> dict[str, Any]:
        """As `LLM.sleep`."""
        return dict(self._calls("sleep", level=level))

    def wake_up(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """As `LLM.wake_up`."""
        return dict(self._calls("wake_up", tags=tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether something is asleep."""
        return bool(self._calls.executor.parts.sleep.asleep)

    def keep(self, asleep: Sequence[str], lacks_weights: bool, mode: str | None) -> dict[str, Any]:
        """Sleeps as the other engines of a server do, as in the answer of `LLM.sleep`, and is
        paused if they are."""
        if mode is not None and mode != self.mode:
            over = self._begin(mode)
            over.set()  # there are no requests, or they stand still
            self._stop(over)
        sleep = self._calls.executor.parts.sleep
        if sleep.lacks_weights and not lacks_weights:  # requests wait while the cache sleeps
            self.wake_up(["weights"])
            self._reload()
        if {*asleep} - {*sleep.asleep} or (lacks_weights and not sleep.lacks_weights):
            self.sleep(2 if lacks_weights else 1)
        if tags := [tag for tag in sleep.asleep if tag not in asleep]:
            self.wake_up(tags)
        return {}


class WeightSteps(ABC):
    """Weights of one of several engines: all of them `stage` new ones while requests run, and then
    all `keep` them, or if any fails those that they have. Steps run one at a time. part: as of
    `replaceable`. refusal: where they cannot be replaced."""

    part: ClassVar[str]
    refusal: ClassVar[str]

    def __init__(self, args: LlmArgs, calls: RankCalls) -> None:
        self._args, self._calls = args, calls
        # What serves the weights that are staged, by their folder and version.
        self._staged: dict[tuple[str, int | str], Callable[[], Any]] = {}

    def keep(self, folder: str, version: Any) -> dict[str, Any]:
        """Serves these weights, which are loaded unless they are staged, and drops what else is
        staged. Returns as `result` what replacing them does, if they are others."""
        weights, wanted = self.weights, (folder, version)
        try:
            if wanted not in self._staged:
                if (weights.folder, weights.version) == wanted:
                    return {}
                self._load(folder, version)
            return {"result": self._staged[wanted]()}
        finally:
            self._staged.clear()

    @abstractmethod
    def _load(self, folder: str, version: Any) -> None:
        """Stages weights that the other engines have."""

    @property
    def weights(self) -> DraftWeights | TargetWeights:
        """Raises ValueError where they cannot be replaced."""
        if (weights := replaceable(self._calls.executor, self.part)[0]) is None:
            raise ValueError(self.refusal)
        return weights

    def _replacing(self, folder: str, *load: Any, **options: Any) -> Callable[[], Any]:
        """A function that replaces the weights by those of the folder. They are loaded now, or by
        several ranks when it is called. load: for the network's loader. options: of what
        `replaceable` returns. Raises ValueError for weights that do not fit."""
        weights = self.weights
        if self._calls.are_several:
            own = {"part": self.part, "folder": folder, "load": load}
            return partial(self._calls, "replace", **own, **options)
        replaced = replaceable(self._calls.executor, self.part)[1]
        return partial(self._calls.here, partial(replaced, weights.stage(folder, *load), **options))
