"""Runs one model over rows of tokens: builds what attention needs from slots and lengths, forwards, computes logits.

The engine of the target and the engine of a draft model are two instances. It does not know requests, sampling or
speculation: context chunks are (slot, start, tokens), generation windows are slots with lengths on the device.
"""

from dataclasses import dataclass

import torch

from tllm_spec.attention.interface import AttentionBackend, AttentionMetadata, ForwardContext
from tllm_spec.executor.resources.slot_state import BlockTable
from tllm_spec.models.causal_lm import CausalLM


@dataclass(frozen=True)
class ContextChunk:
    """`tokens` of one sequence to be prefilled from position `start` on."""

    slot: int
    start: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Windows:
    """B generation windows: slots `[B]`, first positions `[B]`, token_ids `[B, W]`, all on the device. `max_kv_len`
    is a host upper bound of first position + W."""

    slots: torch.Tensor
    first: torch.Tensor
    token_ids: torch.Tensor
    max_kv_len: int


class ModelEngine:
    """A model, its attention backend and its block table.

    `input_vocab_size` is that of the target: a draft model with fewer (padding) rows reads ids beyond its own as its
    last.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        table: BlockTable,
        device: torch.device,
        input_vocab_size: int,
    ) -> None:
        self.model = model
        self._last_token_id = model.config.vocab_size - 1
        self._clamps = input_vocab_size > model.config.vocab_size
        self.backend = backend
        self.table = table
        self.device = device
        self.page_size = backend.pool.page_size

    def forward(self, contexts: list[ContextChunk], windows: Windows | None) -> torch.Tensor:
        """Hidden states of all rows `[T, H]`: the chunks one after another, then the windows. Writes their KV."""
        if not contexts:
            assert windows is not None
            metadata, token_ids = self._window_metadata(windows)
        else:
            metadata, token_ids = self._mixed_metadata(contexts, windows)
        if self._clamps:
            token_ids = token_ids.clamp_max(self._last_token_id)
        context = ForwardContext(self.backend, self.backend.plan(metadata))
        return self.model.forward(token_ids, metadata.positions, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, V]` float32."""
        return self.model.compute_logits(hidden)

    def _window_metadata(self, windows: Windows) -> tuple[AttentionMetadata, torch.Tensor]:
        width = windows.token_ids.shape[1]
        positions = windows.first.unsqueeze(1) + torch.arange(width, device=self.device)
        block_tables = self.table.rows(windows.slots, -(-windows.max_kv_len // self.page_size))
        metadata = AttentionMetadata(
            context_lens=(),
            context_kv_lens=(),
            num_generations=windows.slots.shape[0],
            window=width,
            block_tables=block_tables,
            kv_lens=(windows.first + width).to(torch.int32),
            positions=positions.flatten(),
            kv_slots=self._kv_slots(block_tables, positions).flatten(),
            max_kv_len=windows.max_kv_len,
        )
        return metadata, windows.token_ids.flatten()

    def _mixed_metadata(
        self, contexts: list[ContextChunk], windows: Windows | None
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        lens = tuple(len(chunk.tokens) for chunk in contexts)
        ends = tuple(chunk.end for chunk in contexts)
        num_pages = -(-max((*ends, windows.max_kv_len if windows else 0)) // self.page_size)
        slots = torch.tensor([chunk.slot for chunk in contexts], device=self.device)
        tables = self.table.rows(slots, num_pages)
        starts = torch.tensor([chunk.start for chunk in contexts], device=self.device)
        repeats = torch.tensor(lens, device=self.device)
        # Row r of chunk c stands at start[c] + r - (rows of the chunks before c).
        shift = (starts - repeats.cumsum(0) + repeats).repeat_interleave(repeats)
        positions = torch.arange(sum(lens), device=self.device) + shift
        owners = torch.arange(len(contexts), device=self.device).repeat_interleave(repeats)
        kv_slots = self._kv_slots(tables.index_select(0, owners), positions.unsqueeze(1)).flatten()
        token_ids = torch.tensor([t for chunk in contexts for t in chunk.tokens], device=self.device)
        kv_lens = torch.tensor(ends, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(lens, ends, 0, 1, tables, kv_lens, positions, kv_slots, 0)
        if windows is None:
            return metadata, token_ids
        own, window_ids = self._window_metadata(windows)
        tail = self.table.rows(windows.slots, num_pages)
        metadata.num_generations, metadata.window = own.num_generations, own.window
        metadata.max_kv_len = own.max_kv_len
        metadata.block_tables = torch.cat((tables, tail))
        metadata.kv_lens = torch.cat((kv_lens, own.kv_lens))
        metadata.positions = torch.cat((positions, own.positions))
        metadata.kv_slots = torch.cat((kv_slots, own.kv_slots))
        return metadata, torch.cat((token_ids, window_ids))

    def _kv_slots(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Places of tokens at positions `[N, W]` of rows with pages `[N, P]`."""
        pages = block_tables.gather(1, positions // self.page_size)
        return pages.to(torch.int64) * self.page_size + positions % self.page_size
