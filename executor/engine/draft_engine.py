"""What a drafter with a model of its own needs of the engine that runs the model."""

from typing import Protocol

import torch

from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows


class DraftModelEngine(Protocol):
    """A draft model's forward, in torch or outside."""

    @property
    def rows(self) -> RowBuilder: ...

    @property
    def may_be_captured(self) -> bool:
        """Whether CUDA graphs may hold `last_logits` where they hold the target's rounds."""

    def read(self, chunks: list[ContextChunk]) -> None:
        """Writes the KV of the chunks' tokens."""

    def last_logits(self, windows: Windows) -> torch.Tensor:
        """Writes the KV of the windows' tokens. Returns the logits after the last token of each,
        `[B, V]`. Device work only."""
