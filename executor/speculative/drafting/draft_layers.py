"""A draft network as extra layers of the target's pages: its own pool, the target's block table."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tllm_spec.attention.interface import AttentionBackend, AttentionPlan, ForwardContext
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet


class DraftLayers(Protocol):
    """A draft network as extra layers on the target's pages. `rows` has the block table."""

    @property
    def net(self) -> DraftNet: ...

    @property
    def rows(self) -> RowBuilder: ...

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        """As `DraftNet.forward`, over these chunks and windows. patched: rows whose tokens only the
        device knows, and the tokens. wanted `[R]`: the rows that are returned
        (`ForwardContext.wanted`); None: all. step: see `DraftNet.forward`."""


@dataclass(frozen=True)
class TorchLayers:
    """In torch. `backend` has the pool."""

    net: DraftNet
    backend: AttentionBackend
    rows: RowBuilder

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        metadata, token_ids = self.rows.build(chunks, windows)
        if patched is not None:
            token_ids.index_copy_(0, to_device(patched[0], token_ids.device), patched[1])
        only_writes = self.net.has_one_layer and wanted is not None and not len(wanted)
        plan = AttentionPlan(metadata.kv_slots) if only_writes else self.backend.plan(metadata)
        context = ForwardContext(self.backend, plan, wanted=wanted)
        return self.net.forward(token_ids, metadata.positions, context, state, step)
