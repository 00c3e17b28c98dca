"""A draft network as extra layers of the target's pages: pools of its own, and the block table of
the group that keeps all pages."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet


class DraftLayers(Protocol):
    """A draft network as extra layers on the target's pages. `rows` has the block table."""

    @property
    def net(self) -> DraftNet: ...

    @property
    def rows(self) -> RowBuilder: ...

    @property
    def reads_whole_windows(self) -> bool:
        """Windows are a rectangle: `Windows.part` is not served."""

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
    """In torch. All groups of `attention` have the same rows."""

    net: DraftNet
    attention: AttentionGroups
    reads_whole_windows: ClassVar[bool] = False

    @property
    def rows(self) -> RowBuilder:
        return self.attention.rows

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        only_writes = self.net.has_one_layer and wanted is not None and not len(wanted)
        rows = self.attention.plan(chunks, windows, only_writes=only_writes)
        if patched is not None:
            to_patch = to_device(patched[0], rows.token_ids.device)
            rows.token_ids.index_copy_(0, to_patch, patched[1])
        context = ForwardContext(rows.groups, wanted=wanted)
        return self.net.forward(rows.token_ids, rows.positions, context, state, step)
