"""Runs one model over rows of tokens, and computes the logits of the wanted rows.

An engine knows no requests, sampling or speculation: context chunks are (slot, start, tokens),
windows are slots with lengths on the device."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import replace

import torch

from tllm_spec.attention.geometry import KVPool
from tllm_spec.attention.interface import ForwardContext, GroupAttention, SpecMetadata
from tllm_spec.attention.recurrent import RecurrentRows
from tllm_spec.draft_network.network import (
    ALIGNMENT,
    CACHED_ROWS,
    NEVER,
    OWN_KEYS,
    POSITIONS,
    TOKEN_IDS,
    Network,
    new_outputs,
    pool_inputs,
)
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import (
    AttentionGroups,
    ContextChunk,
    RowBuilder,
    Windows,
    slot_rows,
)
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.models.llama import CausalLM


class ModelEngine:
    """A model and the attention of its layer groups. `spec` captures hidden states for a draft
    head. adapters: LoRA adapters, if any are served."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionGroups,
        spec: SpecMetadata | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.spec = spec
        self.adapters = adapters
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
        if self.is_adapted:
            self.write_adapters(contexts, windows)
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
        own = None if self._captures_last_layer else wanted
        if self.adapters is not None:
            self.adapters.tables.rows.begin(len(token_ids), own)
        context = ForwardContext(groups, self.spec, own, recurrent)
        hidden = self.model.forward(token_ids, positions, context)
        return hidden if wanted is None or own is wanted else hidden.index_select(0, wanted)

    @property
    def is_adapted(self) -> bool:
        """Whether forwards run the adapters of their rows."""
        return self.adapters is not None and self.adapters.tables.rows.is_active

    def use_adapters(self, are_used: bool) -> None:
        """Says whether the next forwards have rows with adapters."""
        if self.adapters is not None:
            self.adapters.use(are_used)

    def write_adapters(self, contexts: list[ContextChunk], windows: Windows | None) -> None:
        """Says which adapter each row of the next forward has."""
        assert self.adapters is not None
        self.adapters.write_rows(*slot_rows(contexts, windows))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, V]` in the model's dtype, or this rank's columns."""
        return self.model.compute_logits(hidden)

    def compute_all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, V]` on every rank."""
        logits, shard = self.model.compute_logits(hidden), self.model.lm_head.shard
        return logits if shard is None else shard.communicator.all_gather(logits)


# Runs a network outside torch over pages of KV in torch.


class PagedNetwork:
    """A network with keys and values for each head, over the pages of `pool`."""

    def __init__(self, network: Network, pool: KVPool, rows: RowBuilder) -> None:
        self.rows = rows
        self._network = network
        # [layers, 2, kv_rows, Hkv, D]
        self._kv = pool.data.flatten(2, 3)
        row_bytes = self._kv[0, 0, 0].numel() * self._kv.element_size()
        self._row_step = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
        self._pool_inputs = {
            name: tensor
            for layer, both in enumerate(self._kv)
            for name, tensor in zip(pool_inputs(layer), both, strict=True)
        }

    @property
    def may_be_captured(self) -> bool:
        return self._network.may_be_captured

    def window_of(self, chunk: ContextChunk) -> Windows:
        """A chunk as one window. Chunks are runs of their own: in a batch all would be as long as
        the longest."""
        numbers = array("q", [*chunk.tokens, chunk.slot, chunk.start])
        tokens, slots, first = to_device(numbers, self.rows.device).split_with_sizes(
            (len(chunk.tokens), 1, 1)
        )
        return Windows(slots, first, tokens.unsqueeze(0), chunk.end)

    def run(
        self,
        windows: Windows,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Writes the KV of the windows' tokens. inputs and outputs: those that not all networks
        have. Device work only."""
        assert windows.tree is None
        page_size = self.rows.page_size
        num_pages = -(-windows.max_kv_len // page_size)
        # The next power of two, at most a row of the block table: networks have few shapes.
        num_pages = min(1 << (num_pages - 1).bit_length(), self.rows.table.device_rows.shape[1])
        metadata, token_ids = self.rows.build(
            [], replace(windows, max_kv_len=num_pages * page_size)
        )
        shape, heads = windows.token_ids.shape, self._kv.shape[3:]
        positions, num_cached = metadata.positions.view(shape), windows.first
        own_keys = positions
        if windows.num_padding is not None:
            num_cached = windows.first + windows.num_padding
            row = torch.arange(shape[1], device=positions.device)
            own_keys = positions.masked_fill(row < windows.num_padding.unsqueeze(1), NEVER)
        num_rows = shape.numel()
        # Keys and values of each layer begin at a multiple of ALIGNMENT.
        padded = -(-num_rows // self._row_step) * self._row_step
        new_kv = self._kv.new_empty((*self._kv.shape[:2], padded, *heads))[:, :, :num_rows]
        own_inputs = {
            TOKEN_IDS: token_ids.view(shape),
            POSITIONS: positions,
            OWN_KEYS: own_keys,
            CACHED_ROWS: self._cached_rows(metadata.block_tables, num_cached),
        }
        new_entries = {
            name: tensor.view(*shape, *heads)
            for layer, both in enumerate(new_kv)
            for name, tensor in zip(new_outputs(layer), both, strict=True)
        }
        self._network.run({**inputs, **own_inputs, **self._pool_inputs}, {**outputs, **new_entries})
        self._kv.index_copy_(2, metadata.kv_slots, new_kv)

    def _cached_rows(self, block_tables: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """`[B, P * page_size]` for pages `[B, P]`: where the first `lens` `[B]` tokens are, then
        -1."""
        page_size = self.rows.page_size
        offsets = torch.arange(page_size, device=block_tables.device)
        rows = (block_tables.to(torch.int64).unsqueeze(-1) * page_size + offsets).flatten(1)
        keys = torch.arange(rows.shape[1], device=rows.device)
        return rows.masked_fill_(keys >= lens.unsqueeze(1), -1)
