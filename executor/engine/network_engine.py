"""Runs a draft model's network outside torch over pages of KV in torch."""

from dataclasses import replace

import torch

from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.draft_network.decoder import LOGITS
from tllm_spec.draft_network.network import DraftNetwork
from tllm_spec.executor.engine.paged_network import PagedNetwork
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows


class NetworkEngine:
    """A draft model with keys and values for each head. `input_vocab_size`: as `ModelEngine`."""

    def __init__(
        self, draft: DraftNetwork, pool: KVPool, rows: RowBuilder, input_vocab_size: int
    ) -> None:
        self.rows = rows
        self._paged = PagedNetwork(draft.network, pool, rows)
        self._dtype, self._num_logits = draft.dtype, draft.num_logits
        self._last_token_id = draft.config.vocab_size - 1
        self._clamps = input_vocab_size > draft.config.vocab_size

    @property
    def may_be_captured(self) -> bool:
        return self._paged.may_be_captured

    def read(self, chunks: list[ContextChunk]) -> None:
        for chunk in chunks:
            self.last_logits(self._paged.window_of(chunk))

    def last_logits(self, windows: Windows) -> torch.Tensor:
        """`[B, V]` in the model's dtype, for chains."""
        token_ids = windows.token_ids
        if self._clamps:
            windows = replace(windows, token_ids=token_ids.clamp_max(self._last_token_id))
        shape = len(token_ids), self._num_logits
        logits = torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        self._paged.run(windows, {}, {LOGITS: logits})
        return logits
