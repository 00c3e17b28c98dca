"""The layers of a draft network over KV pages: on the target's pages, with pools of their own and
the block table of the group that keeps all pages, or on pages of their own."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet


class DraftLayers(Protocol):
    """A draft network over KV pages. `rows` has the block table."""

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


class ModelLayers(DraftLayers, Protocol):
    """A draft model, which reads tokens only."""

    @property
    def may_be_captured(self) -> bool:
        """Whether CUDA graphs may hold a forward where they hold the target's rounds."""

    def after_last(self, windows: Windows) -> torch.Tensor:
        """The states after the last token of each window, `[B, H]`."""


@dataclass(frozen=True)
class TorchLayers:
    """Layers that run in torch. All groups of `attention` have the same rows."""

    net: DraftNet
    attention: AttentionGroups
    reads_whole_windows: ClassVar[bool] = False
    may_be_captured: ClassVar[bool] = True

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

    def after_last(self, windows: Windows) -> torch.Tensor:
        width = windows.token_ids.shape[1]
        return self.forward([], windows, None)[width - 1 :: width]
