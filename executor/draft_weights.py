"""Replaces the draft network's weights in a running engine, and watches what that does to
acceptance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.weight_swap import LoadedWeights, StagedWeights

logger = logging.getLogger(__name__)

WATCHED_ROUNDS = 1000  # of requests after a swap, which decide whether it stays
NUM_VERSIONS = 8  # the latest ones, whose acceptance is kept
MARGIN = 0.1  # by which tokens a round may fall, relatively


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


class DraftWeights(LoadedWeights):
    """cache: has the network's KV. report_worse: called with the folder after a swap that is worse,
    where several engines swap back together. Called in the executor's thread between two rounds."""

    def __init__(
        self,
        load: Callable[[str], Any],
        model: Any,
        cache: PagedCache,
        folder: str,
        communicator: Communicator = SINGLE,
    ) -> None:
        super().__init__(load, model, "draft", folder, communicator)
        self.version = 0
        self._cache = cache
        self._by_version: dict[int, Acceptance] = {}
        self._before: tuple[Acceptance, StagedWeights] | None = None  # while a swap is watched
        self.report_worse: Callable[[str], object] | None = None

    def swap(
        self, staged: StagedWeights, *, keep_cache: bool = False, version: int | None = None
    ) -> int:
        """Returns the new version, by default the next one. The prefix cache of the version before
        is not used any more, unless `keep_cache`."""
        before = replace(self._of(self.version))
        self._before = before, self._replace(staged, keep_cache=keep_cache, version=version)
        logger.info("draft weights of %s are served, version %d", staged.folder, self.version)
        return self.version

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

    def keep_present(self) -> None:
        """What a swap back would bring was derived from a target that has changed."""
        self._before = None

    def _replace(
        self, staged: StagedWeights, *, keep_cache: bool, version: int | None = None
    ) -> StagedWeights:
        """Returns the weights before."""
        with torch.inference_mode():
            old = [(own, own.to("cpu", copy=True)) for own, _ in staged.pairs]
        self.write(staged)
        before = StagedWeights(self.folder, old)
        self.version = self.version + 1 if version is None else version
        self.folder = staged.folder
        if not keep_cache:
            self._cache.start_version(self.version)
        return before
