"""Runs a draft model's network outside torch over pages of KV in torch."""

import math
from array import array
from dataclasses import replace

import torch

from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.draft_network.decoder import (
    CACHED_ROWS,
    LOGITS,
    POSITIONS,
    TOKEN_IDS,
    new_outputs,
    pool_inputs,
)
from tllm_spec.draft_network.network import ALIGNMENT, DraftNetwork
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.executor.rounds.transfer import to_device


class NetworkEngine:
    """A draft model with keys and values for each head. `input_vocab_size`: as `ModelEngine`."""

    def __init__(
        self, draft: DraftNetwork, pool: KVPool, rows: RowBuilder, input_vocab_size: int
    ) -> None:
        self.rows = rows
        self._network, self._config = draft.network, draft.config
        self._last_token_id = draft.config.vocab_size - 1
        self._clamps = input_vocab_size > draft.config.vocab_size
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

    def read(self, chunks: list[ContextChunk]) -> None:
        """One run for each chunk: in a batch all would be as long as the longest."""
        for chunk in chunks:
            numbers = array("q", [*chunk.tokens, chunk.slot, chunk.start])
            tokens, slots, first = to_device(numbers, self.rows.device).split_with_sizes(
                (len(chunk.tokens), 1, 1)
            )
            self.last_logits(Windows(slots, first, tokens.unsqueeze(0), chunk.end))

    def last_logits(self, windows: Windows) -> torch.Tensor:
        """`[B, V]` in the model's dtype, for chains."""
        assert windows.tree is None and windows.num_padding is None
        page_size = self.rows.page_size
        num_pages = self._padded(-(-windows.max_kv_len // page_size))
        metadata, token_ids = self.rows.build(
            [], replace(windows, max_kv_len=num_pages * page_size)
        )
        if self._clamps:
            token_ids = token_ids.clamp_max(self._last_token_id)
        shape, heads = windows.token_ids.shape, self._kv.shape[3:]
        num_rows = shape.numel()
        # Keys and values of each layer begin at a multiple of ALIGNMENT.
        padded = -(-num_rows // self._row_step) * self._row_step
        new_kv = self._kv.new_empty((*self._kv.shape[:2], padded, *heads))[:, :, :num_rows]
        logits = self._kv.new_empty((shape[0], self._config.vocab_size))
        inputs = {
            TOKEN_IDS: token_ids.view(shape),
            POSITIONS: metadata.positions.view(shape),
            CACHED_ROWS: self._cached_rows(metadata.block_tables, windows.first),
        }
        outputs = {LOGITS: logits}
        for layer, both in enumerate(new_kv):
            outputs.update(zip(new_outputs(layer), both.view(2, *shape, *heads), strict=True))
        self._network.run(inputs | self._pool_inputs, outputs)
        self._kv.index_copy_(2, metadata.kv_slots, new_kv)
        return logits

    def _cached_rows(self, block_tables: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """`[B, P * page_size]` for pages `[B, P]`: where the first `lens` `[B]` tokens are, then
        -1."""
        page_size = self.rows.page_size
        offsets = torch.arange(page_size, device=block_tables.device)
        rows = (block_tables.to(torch.int64).unsqueeze(-1) * page_size + offsets).flatten(1)
        keys = torch.arange(rows.shape[1], device=rows.device)
        return rows.masked_fill_(keys >= lens.unsqueeze(1), -1)

    def _padded(self, num_pages: int) -> int:
        """The next power of two, at most a row of the block table: networks have few shapes."""
        return min(1 << (num_pages - 1).bit_length(), self.rows.table.device_rows.shape[1])
