"""Replaces the target's weights of a running engine: `LLM.update_weights`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.speculative.modes import draft_plan_of
from tllm_spec.executor.weight_swap import Part
from tllm_spec.models.checkpoint import SINGLE
from tllm_spec.rank_calls import RankCalls, WeightSteps
from tllm_spec.shared_tensors import SharedTensors
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    import torch

    Source = (
        str
        | os.PathLike[str]
        | SharedTensors
        | Mapping[str, Any]
        | Iterable[tuple[str, torch.Tensor]]
    )

RUNNING = "keep", "retract"
PARTS = "target", "draft", "all"


class TargetUpdate(WeightSteps):
    """Updates the target's weights of an engine at once or, in one of several, by steps.
    swap_draft: replaces the weights of a draft network by those of a folder."""

    part = "target"
    refusal = (
        "update_weights: this engine's weights cannot be replaced while it runs, since its draft "
        "head has copies of some; draft_backend: torch is accepted, and with a head of its own "
        "folder no speculative_token_map"
    )

    def __init__(
        self, args: LlmArgs, calls: RankCalls, swap_draft: Callable[[str], dict[str, Any]]
    ) -> None:
        super().__init__(args, calls)
        self._swap_draft = swap_draft
        self._draft = draft_plan_of(args.speculative_config)

    def update(
        self, source: Source, version: str | None, part: Part, running: str
    ) -> dict[str, Any]:
        """As `LLM.update_weights`."""
        self._check(version, part, running)
        if part == "draft" and self._draft is not None and self._draft.path is not None:
            with folder_of(source, self._draft.path) as folder:
                return self._swap_draft(folder)
        weights, begin = self.weights, monotonic()
        with folder_of(source, self._args.model) as folder:
            stopped = self._update(folder, version, part, running)()
        seconds = {"staged_seconds": monotonic() - begin - stopped, "stopped_seconds": stopped}
        return {"version": weights.version} | seconds

    def stage(self, folder: str, version: str, part: Part, running: str) -> dict[str, Any]:
        """Raises ValueError as `update` does."""
        if part == "draft":
            raise ValueError(
                "part = 'draft': of several engines, POST /v1/draft_model swaps drafts"
            )
        self._check(version, part, running)
        self._staged[folder, version] = self._update(folder, version, part, running)
        return {}

    def _load(self, folder: str, version: str) -> None:
        """Ends the engine if these weights cannot be staged."""
        try:
            self.stage(folder, version, "target", "retract")
        except (ValueError, OSError, MemoryError) as error:
            reason = f"the weights of {folder}, which all engines serve: {error}"
            self._calls.worker.fail(reason)
            raise

    def reload(self) -> None:
        """Loads the weights again that a sleep has dropped."""
        own = self.weights.folder, str(self.weights.version)
        self._load(*own)
        self._staged.pop(own)()

    def _update(self, folder: str, version: str | None, part: Part, running: str) -> Any:
        """As `_replacing`, which returns for how many seconds no round ran."""
        retract = running == "retract" and part != "draft"
        return self._replacing(folder, part, version=version, retract=retract)

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


@contextmanager
def folder_of(source: Source, model: str) -> Iterator[str]:
    """The folder, or one that has these tensors in place of the model's own, in host memory if that
    has room. source: also the fields of `SharedTensors`. Raises ValueError for a name that comes
    twice with different tensors."""
    from safetensors.torch import save_file

    if isinstance(source, (str, os.PathLike)):
        yield os.fspath(source)
        return
    if isinstance(source, Mapping):
        source = SharedTensors(**source)
    found = _collected(source.tensors() if isinstance(source, SharedTensors) else source)
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
