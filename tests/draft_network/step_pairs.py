"""A draft model in torch and in a network outside torch, over caches of the same shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tllm_spec.attention.geometry import AttentionGeometry, KVFormat, KVPool
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.draft_network.network import ExternalDraft, Network
from tllm_spec.executor.engine.rows import (
    AttentionGroups,
    ContextChunk,
    PagedGroup,
    RowBuilder,
    Windows,
)
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.executor.speculative.drafting.draft_net import CausalNet, DraftNet, ExternalModelNet
from tllm_spec.models.eagle3 import Eagle3Head
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import load_model

PAGE_SIZE, NUM_SLOTS, MAX_LEN = 8, 4, 320
CPU = torch.device("cpu")


def load(folder: Path) -> CausalLM:
    return load_model(folder, dtype=torch.float32, device=CPU, max_positions=MAX_LEN)


@dataclass
class Side:
    """One model with its cache. Slot s has every fourth page from s + 1 on, so pages of
    neighbouring slots alternate."""

    net: DraftNet
    pool: KVPool

    def step(
        self, slots: Sequence[int], first: Sequence[int], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Logits after windows `[B, W]` of tokens that start at these positions."""
        longest = max(first) + tokens.shape[1]
        windows = Windows(torch.tensor(slots), torch.tensor(first), tokens, longest)
        return self.net.compute_logits(self.net.after_last(windows))

    def read(self, slot: int, tokens: list[int], start: int = 0) -> None:
        self.net.forward([ContextChunk(slot, start, tokens)], None, None)

    def entries(self, slot: int, length: int) -> torch.Tensor:
        """`[layers, 2, length, Hkv, D]` of the slot's first tokens."""
        pages = self.net.rows.table.host_rows[slot]
        return self.pool.data[:, :, pages].flatten(2, 3)[:, :, :length]


def torch_side(model: CausalLM, input_vocab_size: int | None = None) -> Side:
    pool, rows = cache_of(model)
    geometry = model.config.layer_groups(SINGLE_RANK)[0].geometry
    assert isinstance(geometry, AttentionGeometry)
    attention = AttentionGroups([PagedGroup(VanillaAttention(geometry, pool), rows)])
    size = input_vocab_size or model.config.vocab_size
    return Side(CausalNet(attention, model, size), pool)


def network_side(model: CausalLM, network: Network, input_vocab_size: int | None = None) -> Side:
    pool, rows = cache_of(model)
    draft = ExternalDraft(model.config, model.dtype, CPU, network)
    size = input_vocab_size or model.config.vocab_size
    return Side(ExternalModelNet(draft, pool, rows, size), pool)


def cache_of(model: CausalLM | Eagle3Head) -> tuple[KVPool, RowBuilder]:
    num_pages = MAX_LEN // PAGE_SIZE
    geometry = model.config.layer_groups(SINGLE_RANK)[0].geometry
    pool = KVPool(
        geometry,
        num_pages=1 + NUM_SLOTS * num_pages,
        page_size=PAGE_SIZE,
        kv_format=KVFormat(model.dtype),
        device=CPU,
    )
    pool.data.fill_(torch.nan)  # unwritten entries must not matter
    table = BlockTable(SeqSlotManager(NUM_SLOTS), num_pages, CPU)
    for slot in range(NUM_SLOTS):
        table.write(slot, [1 + slot + NUM_SLOTS * i for i in range(num_pages)], 0)
    table.flush()
    return pool, RowBuilder(table, pool.num_pages, PAGE_SIZE, CPU)
