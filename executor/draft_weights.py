"""Replaces the draft network's weights in a running engine, in place: its CUDA graphs stay valid.

A second network is loaded from another folder in the same way as the first one, so it has every
derived tensor (fused, packed, quantised, token maps). Then the two are walked in parallel: tensors
are pairs to copy, and all else must be equal. So nothing is left of the old weights, or the folder
is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.models.config_file import read_config
from tllm_spec.request_errors import described
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)

WATCHED_ROUNDS = 1000  # of requests after a swap, which decide whether it stays
NUM_VERSIONS = 8  # the latest ones, whose acceptance is kept
MARGIN = 0.1  # by which tokens a round may fall, relatively
# Attributes that layers are given after loading, by measuring and not from weights.
MEASURED = frozenset({"tuned_gemms"})
# Where modules have their parts, which are known without it.
OF_MODULES = frozenset({"_modules", "_parameters", "_buffers"})
SIZES = re.compile(r"_size$|_dim$|_rank$|^num_|_layers$|_heads$")  # keys of config.json
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Path)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StagedWeights:
    """Weights that are loaded and fit. pairs: the engine's tensors, and what they will be."""

    folder: str
    pairs: Sequence[Pair]


@dataclass
class Acceptance:
    """Rounds of the requests of one version, and the tokens that these emitted."""

    rounds: int = 0
    tokens: int = 0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, float]:
        return vars(self) | {"tokens_per_round": self.tokens_per_round}


class DraftWeights:
    """load: a network from a folder. model: the engine's. cache: has the network's KV. folder:
    where its weights are from. communicator: of all ranks. report_worse: called with the folder
    after a swap that is worse, where several engines swap back together.

    `stage` may be called in any thread, all else in the executor's between two rounds."""

    def __init__(
        self,
        load: Callable[[str], Any],
        model: Any,
        cache: PagedCache,
        folder: str,
        communicator: Communicator = SINGLE,
    ) -> None:
        self.version = 0
        self.folder = folder
        self._load, self._model, self._cache = load, model, cache
        self._communicator = communicator
        self._by_version: dict[int, Acceptance] = {}
        self._before: tuple[Acceptance, StagedWeights] | None = None  # while a swap is watched
        self.report_worse: Callable[[str], object] | None = None

    def stage(self, folder: str) -> StagedWeights:
        """Raises ValueError for weights that do not fit in place of the present ones, whatever
        reading them raises; memory that does not suffice is another matter."""
        try:
            # All threads have the device's default stream, so the executor's copies follow.
            with torch.inference_mode():
                pairs = list(pairs_of(self._model, self._load(folder), "draft", set()))
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:  # a border: the files may have anything
            known = isinstance(error, (ValueError, OSError))
            reason = str(error) if known else f"{folder}: {described(error)}"
            if sizes := _other_sizes(self.folder, folder):
                reason = f"the weights do not fit: {sizes} ({reason}); train with --init"
            raise ValueError(reason) from error
        return StagedWeights(folder, pairs)

    def swap(
        self, staged: StagedWeights, *, keep_cache: bool = False, version: int | None = None
    ) -> int:
        """Returns the new version, by default the next one. The prefix cache of the version before
        is not used any more, unless `keep_cache`."""
        before = replace(self._of(self.version))
        self._before = before, self._replace(staged, keep_cache=keep_cache, version=version)
        logger.info("draft weights of %s are served, version %d", staged.folder, self.version)
        return self.version

    def swap_together(self, folder: str, *, keep_cache: bool) -> int:
        """Swaps on all ranks between the same two rounds, which wait: all swap, or none. Raises
        ValueError on every rank if one of them does, as `stage` does, or their files differ."""
        files = self._communicator.gather(_files_of(folder))
        if any(own != files[0] for own in files):
            raise ValueError(f"{folder} does not have the same files on all hosts of the engine")
        staged, problem = None, ""
        try:
            staged = self.stage(folder)
        except (ValueError, torch.cuda.OutOfMemoryError) as error:
            problem = str(error)
        for each in self._communicator.gather(problem):
            if each:
                raise ValueError(each)
        assert staged is not None
        return self.swap(staged, keep_cache=keep_cache)

    def add_end(self, request: LlmRequest) -> None:
        """Counts a request that has ended, for the weights that it began with."""
        if request.draft_limit:
            acceptance = self._of(request.draft_version)
            stats = request.counters.stats()
            acceptance.rounds += stats.rounds
            acceptance.tokens += stats.num_emitted_tokens

    def state(self) -> dict[str, Any]:
        """`draft_weights` of `/server_info`: what is served, and the latest versions'
        acceptance."""
        self._of(self.version)
        rows = {str(version): each.to_dict() for version, each in sorted(self._by_version.items())}
        return {"version": self.version, "folder": self.folder, "by_version": rows}

    def _of(self, version: int) -> Acceptance:
        found = self._by_version.setdefault(version, Acceptance())
        if len(self._by_version) > NUM_VERSIONS:
            del self._by_version[min(self._by_version)]
        return found

    def swap_back_if_worse(self) -> None:
        """Once enough rounds were counted: goes back to the old weights if they were better."""
        if self._before is None or self._of(self.version).rounds < WATCHED_ROUNDS:
            return
        (before, old), now = self._before, self._of(self.version).tokens_per_round
        self._before = None
        if before.rounds < WATCHED_ROUNDS or now >= before.tokens_per_round * (1 - MARGIN):
            return
        logger.warning(
            "draft weights of %s gave %.2f tokens a round, those before %.2f: back to %s",
            *(self.folder, now, before.tokens_per_round, old.folder),
        )
        if self.report_worse is not None:
            self.report_worse(self.folder)
            return
        self._replace(old, keep_cache=False)

    def _replace(
        self, staged: StagedWeights, *, keep_cache: bool, version: int | None = None
    ) -> StagedWeights:
        """Returns the weights before."""
        with torch.inference_mode():
            old = [(own, own.clone()) for own, _ in staged.pairs]
            for own, new in staged.pairs:
                own.copy_(new)
        before = StagedWeights(self.folder, old)
        self.version = self.version + 1 if version is None else version
        self.folder = staged.folder
        if not keep_cache:
            self._cache.start_version(self.version)
        return before


def _files_of(folder: str) -> list[list[Any]]:
    """Names and sizes; none where there is no such folder."""
    path = Path(folder)
    found = path.iterdir() if path.is_dir() else ()
    return sorted([file.name, file.stat().st_size] for file in found)


def pairs_of(old: Any, new: Any, path: str, seen: set[tuple[int, int]]) -> Iterator[Pair]:
    """The tensors of two objects of the same structure. Those that both share, or that were seen,
    are left out. Raises ValueError where they differ in anything but the values of tensors."""
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
        if old != new and not isinstance(old, Path):
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
