"""Pauses an engine, and replaces the target's weights while it serves: `LLM.pause`, `LLM.resume`,
`LLM.update_weights`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.weight_swap import StagedWeights
from tllm_spec.executor.worker import Worker
from tllm_spec.models.checkpoint import SINGLE
from tllm_spec.request_errors import REFUSING_MODES
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    import torch

    Source = str | os.PathLike[str] | Iterable[tuple[str, torch.Tensor]]

RUNNING = "keep", "retract"
NOT_REPLACEABLE = (
    "update_weights: this engine's weights cannot be replaced while it runs, since its draft head "
    "has copies of some; draft_backend: torch is accepted, and with a head of its own folder no "
    "speculative_token_map"
)


def calls_of(executor: PyExecutor) -> dict[str, Callable[..., object]]:
    """What rank 0 announces and every rank does, by name."""

    def resume() -> None:
        executor.is_paused = False

    def update(folder: str, version: str | None, retract: bool) -> float:
        weights = executor.parts.target_weights
        assert weights is not None
        return replaced(executor, weights.stage_together(folder), version, retract=retract)

    calls: dict[str, Callable[..., object]] = {
        "pause": executor.pause,
        "resume": resume,
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
    """Updates and pauses of one engine, from any thread but the executor's."""

    def __init__(self, model: str, executor: PyExecutor, worker: Worker) -> None:
        self._model, self._executor, self._worker = model, executor, worker
        self._calls = calls_of(executor)

    def pause(self, mode: str, cancel_all: Callable[[], None]) -> None:
        """As `LLM.pause`, whose caller refuses requests. cancel_all: cancels those that there
        are."""
        if mode == "abort":
            cancel_all()
        if mode in REFUSING_MODES:
            self._worker.call(lambda: None)  # from here on it is not idle before all have ended
            self._worker.wait_until_idle()
        self._on_all_ranks("pause", retract=mode == "retract")

    def resume(self) -> None:
        self._on_all_ranks("resume")

    def update(
        self,
        source: Source,
        version: str | None,
        running: str,
    ) -> dict[str, Any]:
        """As `LLM.update_weights`."""
        if running not in RUNNING:
            raise ValueError(f"running = {running!r}; it must be one of {', '.join(RUNNING)}")
        if (weights := self._executor.parts.target_weights) is None:
            raise ValueError(NOT_REPLACEABLE)
        begin, retract = monotonic(), running == "retract"
        with folder_of(source, self._model) as folder:
            if self._executor.parts.ranks[1:]:
                options = {"folder": folder, "version": version, "retract": retract}
                stopped = self._on_all_ranks("update_target", **options)
            else:
                own = partial(replaced, self._executor, weights.stage(folder), version)
                stopped = self._worker.call(partial(own, retract=retract))
        seconds = {"staged_seconds": monotonic() - begin - stopped, "stopped_seconds": stopped}
        return {"version": weights.version} | seconds

    def _on_all_ranks(self, name: str, **arguments: Any) -> Any:
        def call() -> object:
            self._executor.parts.queue.announce(name, **arguments)
            return self._calls[name](**arguments)

        return self._worker.call(call)


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
