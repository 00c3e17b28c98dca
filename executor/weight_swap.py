"""Replaces weights of a running engine, in place: its CUDA graphs stay valid.

A second network is loaded from another folder in the same way as the first one, but to host
memory. It has every derived tensor (fused, packed, quantised, token maps) in the form of the
device. Then the two are walked in parallel: tensors are pairs to copy, and all else must be equal.
So nothing is left of the old weights, or the folder is refused before the first byte is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from tllm_spec.adapters.adapted_layers import AdaptedStack, AdaptedWeight
from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.device.sleeping_memory import SleepingMemory
from tllm_spec.models.config_file import read_config
from tllm_spec.models.linear import renew_derived
from tllm_spec.request_errors import described
from tllm_spec.zoo.registry import resolve_model

# Attributes that layers are given after loading, by measuring or for adapters, not from weights.
MEASURED = frozenset({"tuned_gemms", "gemms", "tiles", "adapters"})
# Where modules have their parts, which are known without it.
OF_MODULES = frozenset({"_modules", "_parameters", "_buffers"})
SIZES = re.compile(r"_size$|_dim$|_rank$|^num_|_layers$|_heads$")  # keys of config.json
CONTAINERS = (Mapping, list, tuple, set, frozenset)
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Path)

Result = TypeVar("Result")
Pair = tuple[torch.Tensor, torch.Tensor]
Part = Literal["target", "draft", "all"]  # which weights a checkpoint is for


@dataclass(frozen=True)
class StagedWeights:
    """Weights that are loaded and fit. pairs: the engine's tensors, and what they will be."""

    folder: str
    pairs: Sequence[Pair]
    memory: SleepingMemory | None = None
    """Has the new tensors, if they are locked in host memory."""
    part: Part = "target"


class LoadedWeights:
    """load: a network from a folder, in host memory. model: the engine's, called `name` in errors.
    folder: where its weights are from. communicator: of all ranks. `stage` may be called in any
    thread."""

    def __init__(
        self,
        load: Callable[..., Any],
        model: Any,
        name: str,
        folder: str,
        communicator: Communicator = SINGLE,
    ) -> None:
        self.folder = folder
        self._load, self._model, self._name = load, model, name
        self._communicator = communicator

    def stage(self, folder: str, *part: Part) -> StagedWeights:
        """part: for `load`. Raises ValueError for weights that do not fit in place of the present
        ones, or are not finite, whatever reading them raises; memory that does not suffice is
        another matter."""
        try:
            with torch.inference_mode():
                pairs = list(pairs_of(self._model, self._load(folder, *part), self._name, set()))
                _check_finite(new for _, new in pairs)
                memory = _locked(pairs)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # a border: the files may have anything
            known = isinstance(error, (ValueError, OSError))
            reason = str(error) if known else f"{folder}: {described(error)}"
            if sizes := _other_sizes(self.folder, folder):
                reason = f"the weights do not fit: {sizes} ({reason}); train with --init"
            raise ValueError(reason) from error
        return StagedWeights(folder, pairs, memory, *part)

    def stage_together(self, folder: str, *part: Part) -> StagedWeights:
        """Stages on all ranks between the same two rounds, which wait. Raises ValueError on every
        rank if one of them does, as `stage` does, or their files differ."""
        files = self._communicator.gather(_files_of(folder))
        if any(own != files[0] for own in files):
            raise ValueError(f"{folder} does not have the same files on all hosts of the engine")
        return read_together(self._communicator, lambda: self.stage(folder, *part))

    def write(self, staged: StagedWeights) -> None:
        """In the executor's thread between two rounds, with none in flight."""
        with torch.inference_mode():
            for own, new in staged.pairs:
                own.copy_(new)
            for model in self._model if isinstance(self._model, Sequence) else [self._model]:
                renew_derived(model)


def read_together(communicator: Communicator, read: Callable[[], Result]) -> Result:
    """Calls `read` on all ranks. Raises ValueError on every rank if one of them does, or lacks the
    memory."""
    found: Result | None = None
    problem = ""
    try:
        found = read()
    except (ValueError, torch.cuda.OutOfMemoryError) as error:
        problem = str(error)
    for each in communicator.gather(problem):
        if each:
            raise ValueError(each)
    assert found is not None
    return found


def _locked(pairs: Iterable[Pair]) -> SleepingMemory | None:
    """Moves the tensors that go to a CUDA device to host memory that copies are fast from."""
    if not any(own.is_cuda for own, _ in pairs):
        return None
    memory = SleepingMemory(torch.device("cpu"), is_locked=True)
    memory.place("staged", (new for _, new in pairs))
    return memory


def _check_finite(tensors: Iterable[torch.Tensor]) -> None:
    for each in tensors:
        if each.is_mkldnn:  # a copy of another one, in oneDNN's layout
            continue
        # A type of 8 bits has no such test.
        tested = each.half() if each.element_size() == 1 else each
        if each.is_floating_point() and each.numel() and not _ends(tested).isfinite().all():
            raise ValueError("the weights have numbers that are infinite or no numbers")


def _ends(values: torch.Tensor) -> torch.Tensor:
    """`[2]`: the least and the greatest, both NaN if there is one. Takes no further memory."""
    return torch.stack(values.aminmax())


def _files_of(folder: str) -> list[list[Any]]:
    """Names and sizes; none where there is no such folder."""
    path = Path(folder)
    found = path.iterdir() if path.is_dir() else ()
    return sorted([file.name, file.stat().st_size] for file in found)


def pairs_of(old: Any, new: Any, path: str, seen: set[tuple[int, int]]) -> Iterator[Pair]:
    """The tensors of two objects of the same structure. Those that both share, or that were seen,
    are left out. Raises ValueError where they differ in anything but the values of tensors."""
    if isinstance(old, (AdaptedWeight, AdaptedStack)):
        old = old.base
    if old is new or (id(old), id(new)) in seen:
        return
    seen.add((id(old), id(new)))
    if type(old) is not type(new):
        raise ValueError(_differ(path, type(old).__name__, type(new).__name__))
    if isinstance(old, torch.Tensor):
        if (old.shape, old.dtype, old.layout) != (new.shape, new.dtype, new.layout):
            raise ValueError(_differ(path, _described(old), _described(new)))
        yield old, new
    elif isinstance(old, PLAIN):
        if old != new and not isinstance(old, (Path, torch.device)):
            raise ValueError(_differ(path, old, new))
    else:
        yield from _pairs_of_parts(_parts(old), _parts(new), path, seen)


def _pairs_of_parts(
    old: Mapping[Any, Any], new: Mapping[Any, Any], path: str, seen: set[tuple[int, int]]
) -> Iterator[Pair]:
    names = old.keys() - MEASURED
    if names != new.keys() - MEASURED:
        raise ValueError(_differ(path, sorted(map(str, old)), sorted(map(str, new))))
    for name, value in old.items():
        if name not in names:
            continue
        own = path if name in OF_MODULES else f"{path}.{name}"
        yield from pairs_of(value, new[name], own, seen)


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors of an object, without those of communicators. seen: ids of what was there."""
    if id(value) in seen or isinstance(value, (*PLAIN, Communicator)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, CONTAINERS) or hasattr(value, "__dict__"):
        for each in _parts(value).values():
            yield from tensors_of(each, seen)


def _parts(value: Any) -> Mapping[Any, Any]:
    """What an object consists of."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if hasattr(value, "__dict__"):
        attributes: dict[str, Any] = vars(value)
        return attributes
    raise ValueError(f"{type(value).__name__} is not known to be replaceable")


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _differ(path: str, old: object, new: object) -> str:
    return f"the weights do not fit: {path} is {old} in the engine, and {new} in the folder"


def _other_sizes(own: str, folder: str) -> str:
    """The sizes in which the two folders' config.json differ, the engine's first."""
    try:
        of_own, of_folder = (
            dict(_sizes(read_config(resolve_model(each)))) for each in (own, folder)
        )
    except ValueError:
        return ""
    return ", ".join(
        f"{key} {size} against {of_folder[key]}"
        for key, size in of_own.items()
        if of_folder.get(key, size) != size
    )


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif isinstance(value, int) and SIZES.search(key):
            yield key, value
