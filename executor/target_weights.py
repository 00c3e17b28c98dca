"""Replaces the target's weights in a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.weight_swap import LoadedWeights, StagedWeights
from tllm_spec.outputs import FIRST_VERSION
from tllm_spec.request_errors import described

logger = logging.getLogger(__name__)


class WeightsTorn(RuntimeError):
    """Some weights are replaced and others are not: the engine must not serve them."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(
            f"an update with {folder} has failed while weights were written, and the engine "
            f"serves no more: {reason}"
        )


class TargetWeights(LoadedWeights):
    """The target's weights, and those of MTP modules in its checkpoint. load: also takes the part.
    caches: have KV of either. version: of the target's weights that are served."""

    def __init__(
        self,
        load: Callable[..., Any],
        models: Sequence[Any],
        caches: Sequence[PagedCache],
        folder: str,
        communicator: Communicator = SINGLE,
    ) -> None:
        super().__init__(load, models, "model", folder, communicator)
        self._caches = caches
        self.version, self.num_updates = FIRST_VERSION, 0

    def replace(self, staged: StagedWeights, version: str | None) -> None:
        """version: a name for the target's weights; None: how often they were replaced. Nothing
        that was cached before is reused. Called in the executor's thread between two rounds, with
        none in flight. Raises WeightsTorn."""
        try:
            self.write(staged)
        except (RuntimeError, MemoryError, AssertionError) as error:  # of torch or the device
            raise WeightsTorn(staged.folder, described(error)) from error
        self.num_updates += 1
        if staged.part != "draft":
            self.folder, self.version = staged.folder, version or str(self.num_updates)
        for cache in self._caches:
            cache.start_version(f"update {self.num_updates}")
        logger.info(
            "weights (%s) of %s are served, version %s", staged.part, staged.folder, self.version
        )
