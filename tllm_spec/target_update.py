"""Pauses an engine, lets it sleep, and replaces its weights while it serves: `LLM.pause`,
`LLM.resume`, `LLM.sleep`, `LLM.wake_up`, `LLM.update_weights`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.executor.target_weights import TargetWeights, WeightsTorn
from tllm_spec.executor.weight_swap import Part, StagedWeights
from tllm_spec.executor.worker import Worker
from tllm_spec.models.checkpoint import SINGLE
from tllm_spec.request_errors import PAUSE_MODES, REFUSING_MODES
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    import torch

    Source = str | os.PathLike[str] | Iterable[tuple[str, torch.Tensor]]

RUNNING = "keep", "retract"
PARTS = "target", "draft", "all"
NOT_REPLACEABLE = (
    "update_weights: this engine's weights cannot be replaced while it runs, since its draft head "
    "has copies of some; draft_backend: torch is accepted, and with a head of its own folder no "
    "speculative_token_map"
)


def calls_of(executor: PyExecutor) -> dict[str, Callable[..., object]]:
    """What rank 0 announces and every rank does, by name."""

    def resume() -> None:
        executor.is_paused = False

    def update(folder: str, part: Part, version: str | None, retract: bool) -> float:
        weights = executor.parts.target_weights
        assert weights is not None
        return replaced(executor, weights.stage_together(folder, part), version, retract=retract)

    calls: dict[str, Callable[..., object]] = {
        "pause": executor.pause,
        "resume": resume,
        "sleep": executor.sleep,
        "wake_up": executor.parts.sleep.wake_up,
        "update_target": update,
    }
    if (drafts := executor.parts.draft_weights) is not None:
        calls["swap_draft"] = drafts.swap_together
    if (adapters := executor.parts.adapters) is not None:
        calls |= {"load_adapter": adapters.load_together, "unload_adapter": adapters.remove}
    return calls


def replaced(
    executor: PyExecutor, staged: StagedWeights, version: str | None, *, retract: bool
) -> float:
    """Replaces the target's weights. Returns for how many seconds no round ran."""
    start = monotonic()
    executor.replace_weights(staged, version, retract=retract)
    return monotonic() - start


class TargetUpdate:
    """Updates, pauses and sleep of one engine, from any thread but the executor's. swap_draft:
    replaces the weights of a draft network by those of a folder."""

    def __init__(
        self,
        args: LlmArgs,
        executor: PyExecutor,
        worker: Worker,
        swap_draft: Callable[[str], dict[str, Any]],
    ) -> None:
        self._args, self._executor, self._worker = args, executor, worker
        self._swap_draft = swap_draft
        self._draft = draft_plan_of(args.speculative_config)
        self._staged: Callable[[], float] | None = None  # and not committed
        self._calls = calls_of(executor)

    def check_pause(self, mode: str) -> None:
        """Raises ValueError for a mode that is not known, or that cannot be now."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode = {mode!r}; it must be one of {', '.join(PAUSE_MODES)}")
        if mode == "wait" and self._executor.parts.sleep.holds_rounds:
            raise ValueError(
                "mode = 'wait': no request can be finished while the engine sleeps or lacks its "
                "weights; accepted are abort, keep and retract"
            )

    def pause(self, mode: str, cancel_all: Callable[[], None]) -> None:
        """As `LLM.pause`, whose caller has checked the mode and refuses requests. cancel_all:
        cancels those that there are."""
        if mode == "abort":
            cancel_all()
        if mode == "wait":
            self.resume()  # from another mode, in which requests stand still
        if mode in REFUSING_MODES:
            self._worker.call(lambda: None)  # from here on it is not idle before all have ended
            self._worker.wait_until_idle()
        self._on_all_ranks("pause", retract=mode == "retract")

    def resume(self) -> None:
        self._on_all_ranks("resume")

    def sleep(self, level: int) -> dict[str, Any]:
        """As `LLM.sleep`."""
        told: dict[str, Any] = self._on_all_ranks("sleep", level=level)
        return told

    def wake_up(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """As `LLM.wake_up`."""
        told: dict[str, Any] = self._on_all_ranks("wake_up", tags=tags)
        return told

    @property
    def is_sleeping(self) -> bool:
        return bool(self._executor.parts.sleep.asleep)

    def update(
        self,
        source: Source,
        version: str | None,
        part: Part,
        running: str,
    ) -> dict[str, Any]:
        """As `LLM.update_weights`."""
        self._check(version, part, running)
        if part == "draft" and self._draft is not None and self._draft.path is not None:
            with folder_of(source, self._draft.path) as folder:
                return self._swap_draft(folder)
        weights, begin = self._weights(), monotonic()
        with folder_of(source, self._args.model) as folder:
            if self._executor.parts.ranks[1:]:
                retract = running == "retract" and part != "draft"
                options = {"folder": folder, "part": part, "version": version, "retract": retract}
                stopped = self._on_all_ranks("update_target", **options)
            else:
                stopped = self._call(self._loaded(folder, version, part, running))
        seconds = {"staged_seconds": monotonic() - begin - stopped, "stopped_seconds": stopped}
        return {"version": weights.version} | seconds

    # The steps of an update of one of several engines: all of them stage, and then all commit, or
    # all keep what they have if any fails.

    def stage(self, folder: str, version: str | None, part: Part, running: str) -> dict[str, Any]:
        """Raises ValueError as `update` does."""
        self._check(version, part, running)
        self._staged = self._loaded(folder, version, part, running)
        return {}

    def commit(self) -> dict[str, float]:
        """Returns for how many seconds no round ran."""
        replace_staged, self._staged = self._staged, None
        assert replace_staged is not None
        return {"stopped_seconds": self._call(replace_staged)}

    def keep(self, folder: str, version: str) -> dict[str, Any]:
        """Drops what is staged, and loads what is to be served if that is something else. If that
        cannot be loaded the engine serves no more."""
        weights, self._staged = self._weights(), None
        if (weights.folder, weights.version) != (folder, version):
            try:
                self.stage(folder, version, "target", "retract")
                self.commit()
            except (ValueError, OSError, MemoryError) as error:
                self._worker.fail(f"the weights of {folder}, which all engines serve: {error}")
                raise
        return {}

    def _loaded(
        self, folder: str, version: str | None, part: Part, running: str
    ) -> Callable[[], float]:
        """What replaces the weights by those of the folder, which are loaded, as `replaced`."""
        retract = running == "retract" and part != "draft"
        staged = self._weights().stage(folder, part)
        return partial(replaced, self._executor, staged, version, retract=retract)

    def _weights(self) -> TargetWeights:
        if (weights := self._executor.parts.target_weights) is None:
            raise ValueError(NOT_REPLACEABLE)
        return weights

    def _check(self, version: str | None, part: str, running: str) -> None:
        mistakes = []
        if running not in RUNNING:
            mistakes.append(f"running = {running!r}; it must be one of {', '.join(RUNNING)}")
        if part not in PARTS:
            mistakes.append(f"part = {part!r}; it must be one of {', '.join(PARTS)}")
        elif part != "target" and self._draft is None:
            mistakes.append(f"part = {part!r}: the engine has no draft network; accepted: 'target'")
        elif part == "all" and self._draft is not None and self._draft.path is not None:
            mistakes.append(
                "part = 'all': the draft weights are not in the target's checkpoint; accepted: "
                "'target' and 'draft', one after the other"
            )
        if part == "draft" and version is not None:
            mistakes.append(f"version = {version!r} names the target's weights; part is 'draft'")
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def _on_all_ranks(self, name: str, **arguments: Any) -> Any:
        def call() -> object:
            self._executor.parts.queue.announce(name, **arguments)
            return self._calls[name](**arguments)

        return self._call(call)

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return self._worker.call(function)
        except WeightsTorn as error:  # no round has run since
            self._worker.fail(str(error))
            raise


@contextmanager
def folder_of(source: Source, model: str) -> Iterator[str]:
    """The folder, or one that has these tensors in place of the model's own, in host memory if that
    has room. Raises ValueError for a name that comes twice with different tensors."""
    from safetensors.torch import save_file

    if isinstance(source, (str, os.PathLike)):
        yield os.fspath(source)
        return
    found = _collected(source)
    own, memory = resolve_model(model), Path("/dev/shm")
    if not own.is_dir():
        raise ValueError(f"{model} is one file: its weights are updated from a folder only")
    size = sum(tensor.nbytes for tensor in found.values())
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * size
    with TemporaryDirectory(dir=memory if has_room else None) as name:
        folder = Path(name)
        for path in own.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") and "index" not in path.name:
                shutil.copy(path, folder)
        save_file(found, folder / SINGLE)
        found.clear()
        yield name


def _collected(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        if name in found and not copy.equal(found[name]):
            raise ValueError(f"the weights have {name} twice, with different numbers")
        found[name] = copy
    return found
