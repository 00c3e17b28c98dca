"""The rows of draft trees that the engine builds: positions by depth, KV slots by row."""

import pytest
import torch

from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, TreeRows, Windows
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.kernels.attention.visible_keys import TreeMask

CPU = torch.device("cpu")
PAGE_SIZE, TABLES = 4, {0: [7, 3, 9], 1: [2, 5, 8]}


@pytest.fixture
def rows() -> RowBuilder:
    table = BlockTable(SeqSlotManager(2), 3, CPU)
    for slot, pages in TABLES.items():
        table.write(slot, pages, 0)
    table.flush()
    return RowBuilder(table, 10, PAGE_SIZE, CPU)


def beams(first: list[int], offset: int) -> Windows:
    """Two beams of each slot that follow `offset` earlier keys of the tree."""
    bits = torch.full((len(first), 2), 1)
    tree = TreeRows(torch.tensor([[1, 2]] * len(first)), TreeMask(bits, offset + 2))
    slots = torch.arange(2 - len(first), 2)
    token_ids = torch.arange(2 * len(first)).view(-1, 2)
    return Windows(slots, torch.tensor(first), token_ids, max(first) + offset + 2, tree=tree)


def test_beams_write_after_earlier_steps_and_have_the_positions_of_their_depth(
    rows: RowBuilder,
) -> None:
    windows = beams([3, 6], 3)
    metadata, token_ids = rows.build([], windows)
    assert metadata.positions.tolist() == [4, 5, 7, 8]
    assert metadata.kv_slots.tolist() == [3 * 4 + 2, 3 * 4 + 3, 8 * 4 + 1, 8 * 4 + 2]
    assert metadata.kv_lens.tolist() == [8, 11] and metadata.block_tables.shape == (2, 3)
    assert windows.tree is not None and metadata.tree is windows.tree.mask
    assert token_ids.tolist() == [0, 1, 2, 3]


def test_a_chunk_before_the_beams_keeps_its_own_rows(rows: RowBuilder) -> None:
    windows = beams([6], 1)
    metadata, _ = rows.build([ContextChunk(0, 2, [5, 6, 7])], windows)
    assert metadata.positions.tolist() == [2, 3, 4, 7, 8]
    assert metadata.kv_slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4, 5 * 4 + 3, 8 * 4]
    assert metadata.kv_lens.tolist() == [5, 9]
    assert windows.tree is not None and metadata.tree is windows.tree.mask
