"""A request without drafts has one row in a round next to drafting requests: what the scheduler
counts, the pages that it takes, and where all requests have whole windows."""

from pathlib import Path

import pytest
import torch

from tests.executor.graph_rounds import with_graphs
from tests.executor.harness import user_provided
from tests.executor.row_rounds import DRAFT_LEN, PROMPT, rows_and_batches, wrong_drafts
from tests.kernels.row_counts import ragged_rows
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, TreeRows, Windows
from tllm_spec.executor.request import RequestState
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.executor.speculative.drafting.drafter import WindowResult
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows


def test_the_budget_of_a_round_counts_the_rows_that_run(tiny: Path) -> None:
    harness = wrong_drafts(
        tiny, max_num_tokens=24, enable_chunked_prefill=True, disable_overlap_scheduler=True
    )
    running = [harness.submit(PROMPT[i:], 40, draft_limit=4 * (i == 0)) for i in range(3)]
    for request in running:
        harness.run_until(request, RequestState.GENERATION)
    late = harness.submit(list(range(40)), 4)
    harness.round()
    assert late.kv_len == 24 - (5 + 1 + 1)
    harness.run()


def test_pages_are_taken_for_the_row_of_a_request_without_drafts(tiny: Path) -> None:
    harness = wrong_drafts(
        tiny, kv_cache_config={"tokens_per_block": 1}, disable_overlap_scheduler=True
    )
    wanting, plain = harness.submit(PROMPT, 20), harness.submit(PROMPT[1:], 20, draft_limit=0)
    seen: list[tuple[int, int]] = []
    prepare = harness.parts.kv.prepare_resources

    def watched(batch: ScheduledBatch) -> None:
        if len(batch.generation_requests) == 2:
            both = wanting, plain
            seen.append(tuple(harness.parts.kv.held(r)[0] - r.num_tokens for r in both))
        prepare(batch)

    harness.parts.kv.prepare_resources = watched  # type: ignore[method-assign]
    harness.run()
    assert len(seen) > 10 and set(seen) == {(DRAFT_LEN, 0)}


@pytest.mark.usefixtures("eager_graphs")
def test_in_a_round_that_a_graph_holds_all_requests_have_whole_windows(tiny: Path) -> None:
    """One launch of more rows takes less time than a round kernel by kernel. Chunks that join do
    not change the windows."""
    options = user_provided(lambda request: [1] * DRAFT_LEN, DRAFT_LEN)
    harness = with_graphs(tiny, (1, 2), {0, DRAFT_LEN}, **options)
    seen = rows_and_batches(harness)
    for limit in (DRAFT_LEN, 0):
        harness.run_until(
            harness.submit([limit, *PROMPT], 90, draft_limit=limit), RequestState.GENERATION
        )
    seen.clear()
    harness.round()
    late = harness.submit(PROMPT, 90)
    harness.run_until(late, RequestState.GENERATION)
    harness.round()
    assert [num_rows for num_rows, _ in seen] == [5 + 5, 5 + 5 + len(PROMPT), 5 + 1 + 5]
    harness.run()


# The rows of draft trees that the engine builds: positions by depth, KV slots by row.


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


# Which rows of the target's forward a draft network takes hidden states from.


TREE = DraftShape(2, 4, 2, mean_rows=3)
PATHS = torch.tensor([[0, 1, 1], [0, 2, 3], [0, 0, 0]])


def taken(part: RoundRows | None, read_rows: torch.Tensor | None) -> list[int]:
    """After two rows of chunks."""
    three = torch.arange(3)
    windows = Windows(three, three, torch.zeros(3, 5, dtype=torch.int64), 9, part=part)
    sampled = SampledTokens(PATHS, three, rows=PATHS)
    rows = WindowResult(windows, sampled, TREE, read_rows).captured_rows(2)
    assert rows is not None
    return [int(row) - 2 for row in rows[2:]]


@pytest.mark.parametrize("are_padded", [False, True])
def test_rows_of_trees_that_share_a_round_are_those_of_the_accepted_path(are_padded: bool) -> None:
    part = ragged_rows((2, 4, 1), 5)
    padded = part.padded_rows.flatten() if are_padded else None
    expected = [0, 1, 1, 2, 4, 5, 6, 6, 6]
    assert taken(None if are_padded else part, padded) == expected


def test_rows_of_whole_trees_are_those_of_the_accepted_path() -> None:
    assert taken(None, None) == [0, 1, 1, 5, 7, 8, 10, 10, 10]
