"""Replaces the target's weights in a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.weight_swap import LoadedWeights, StagedWeights

logger = logging.getLogger(__name__)

FIRST_VERSION = "default"


class TargetWeights(LoadedWeights):
    """The target's weights, and those of MTP modules in its checkpoint. caches: have KV of either.
    version: of the weights that are served."""

    def __init__(
        self,
        load: Callable[[str], Any],
        models: Sequence[Any],
        caches: Sequence[PagedCache],
        folder: str,
        communicator: Communicator = SINGLE,
    ) -> None:
        super().__init__(load, models, "model", folder, communicator)
        self._caches = caches
        self.version, self.num_updates = FIRST_VERSION, 0

    def stage(self, folder: str) -> StagedWeights:
        """Refuses numbers that are not finite, too."""
        staged = super().stage(folder)
        for _, new in staged.pairs:
            if new.is_mkldnn:  # a copy of another one, in oneDNN's layout
                continue
            # A type of 8 bits has no such test.
            tested = new.half() if new.element_size() == 1 else new
            if new.is_floating_point() and not tested.isfinite().all():
                raise ValueError(f"{folder} has weights that are infinite or no numbers")
        return staged

    def replace(self, staged: StagedWeights, version: str | None) -> None:
        """version: a name for the weights; None: how often they were replaced. Nothing that was
        cached before is reused. Called in the executor's thread between two rounds, with none in
        flight."""
        with torch.inference_mode():
            for own, new in staged.pairs:
                own.copy_(new)
        self.num_updates += 1
        self.folder, self.version = staged.folder, version or str(self.num_updates)
        for cache in self._caches:
            cache.start_version(f"update {self.num_updates}")
        logger.info("weights of %s are served, version %s", staged.folder, self.version)
