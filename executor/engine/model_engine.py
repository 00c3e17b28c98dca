"""Runs one model over rows of tokens, and computes the logits of the wanted rows.

An engine knows no requests, sampling or speculation: context chunks are (slot, start, tokens),
windows are slots with lengths on the device."""

import torch

from tllm_spec.attention.interface import ForwardContext, GroupAttention
from tllm_spec.attention.recurrent import RecurrentRows
from tllm_spec.attention.spec_metadata import SpecMetadata
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.models.causal_lm import CausalLM


class ModelEngine:
    """A model and the attention of its layer groups. `spec` captures hidden states for a draft
    head."""

    def __init__(
        self, model: CausalLM, attention: AttentionGroups, spec: SpecMetadata | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self.spec = spec
        self._captures_last_layer = (
            spec is not None and spec.last_layer >= model.config.num_layers - 1
        )

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state, which no rewind takes back."""
        return self.attention.memory is not None

    @property
    def rows(self) -> RowBuilder:
        """The rows of the first layer group."""
        return self.attention.rows

    def forward(
        self,
        contexts: list[ContextChunk],
        windows: Windows | None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the KV of all rows, the chunks' and then the windows', and returns their hidden
        states `[T, H]`.

        wanted: returns these rows `[R]` only, `[R, H]`; the others skip most of the last layer."""
        rows = self.attention.plan(contexts, windows)
        return self.run(rows.token_ids, rows.positions, rows.groups, wanted, rows.recurrent)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: tuple[GroupAttention, ...],
        wanted: torch.Tensor | None = None,
        recurrent: RecurrentRows | None = None,
    ) -> torch.Tensor:
        """The forward of planned rows `[T]`: device work only."""
        if wanted is None or not self._captures_last_layer:
            context = ForwardContext(groups, self.spec, wanted, recurrent)
            return self.model.forward(token_ids, positions, context)
        context = ForwardContext(groups, self.spec, None, recurrent)
        return self.model.forward(token_ids, positions, context).index_select(0, wanted)

    def keep_paths(self, windows: Windows, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Moves the KV of the accepted rows of trees to the front of their windows: lens `[B]` of
        rows `[B, D+1]`."""
        self.attention.keep_paths(windows, rows, lens)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, V]` in the model's dtype, or this rank's columns."""
        return self.model.compute_logits(hidden)

    def compute_all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, V]` on every rank."""
        logits, shard = self.model.compute_logits(hidden), self.model.lm_head.shard
        return logits if shard is None else shard.gather(logits)
