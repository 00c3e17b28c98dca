"""What the host does before a prompt's forward begins, which the device waits for: the numbers of
its rows against a plain loop, and how many operations of torch there are. They are counted, not
timed."""

from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.plain_prefill import PlainInPlace, PlainPrefill
from tests.executor.draft_caches import one_model
from tests.executor.harness import Harness
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import (
    ROW_ALIGNMENT,
    AttentionGroups,
    ContextChunk,
    PagedGroup,
    RowBuilder,
)
from tllm_spec.executor.graphs.context_graphs import MAX_CHUNKS, capture_contexts
from tllm_spec.executor.graphs.slot_graphs import GraphPool
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.executor.sampling.row_group import SamplingState
from tllm_spec.kernels.attention.paged_prefill import PrefillRows

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE, DUMMY = 40, 4, 3
TABLES = {0: [7, 3, 39, 1, 12], 1: [2, 30], 2: list(range(20, 30)), DUMMY: [0] * 10}
CHUNKS = [(0, 0, 20), (1, 5, 3), (2, 3, 30), (1, 0, 1), (DUMMY, 0, 9), (DUMMY, 0, 0)]


@pytest.fixture
def rows() -> RowBuilder:
    table = BlockTable(SeqSlotManager(DUMMY), 10, CPU)
    for slot, pages in TABLES.items():
        if slot != DUMMY:  # it has page 0 though no window writes there
            table.write(slot, pages, 0)
    table.flush()
    return RowBuilder(table, NUM_PAGES, PAGE_SIZE, CPU)


def chunks_of(*spans: tuple[int, int, int]) -> list[ContextChunk]:
    """Chunks by slot, first position and length; every token is another one."""
    return [
        ContextChunk(slot, start, list(range(100 * i, 100 * i + n)))
        for i, (slot, start, n) in enumerate(spans)
    ]


def expected(chunks: list[ContextChunk]) -> list[list[int]]:
    """Token by token."""
    found = []
    for chunk in chunks:
        for offset, token in enumerate(chunk.tokens):
            position = chunk.start + offset
            page = TABLES[chunk.slot][position // PAGE_SIZE]
            found.append([token, position, page * PAGE_SIZE + position % PAGE_SIZE])
    return [list(row) for row in zip(*found, strict=True)]


@pytest.mark.parametrize("number", range(1, len(CHUNKS) + 1))
def test_rows_are_those_that_a_plain_loop_finds(number: int, rows: RowBuilder) -> None:
    chunks = chunks_of(*CHUNKS[:number])
    metadata, token_ids = rows.build(chunks, None)
    assert [
        token_ids.tolist(),
        metadata.positions.tolist(),
        metadata.kv_slots.tolist(),
    ] == expected(chunks)
    lens, ends = [len(chunk.tokens) for chunk in chunks], [chunk.end for chunk in chunks]
    assert (list(metadata.context_lens), list(metadata.context_kv_lens)) == (lens, ends)
    assert metadata.kv_lens.tolist() == ends and metadata.kv_lens.dtype == torch.int32
    for table, chunk in zip(metadata.block_tables.tolist(), chunks, strict=True):
        pages = TABLES[chunk.slot][: -(-chunk.end // PAGE_SIZE)]
        assert table[: len(pages)] == pages
    assert (
        rows.pages(chunks).tolist()
        == PrefillRows.build(lens, ends, metadata.block_tables, 4).pages.tolist()
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_each_row_begins_where_kernels_that_were_compiled_for_a_whole_tensor_may_read_it(
    length: int, rows: RowBuilder
) -> None:
    metadata, token_ids = rows.build(chunks_of((2, 0, length)), None)
    assert [len(row) for row in (token_ids, metadata.positions, metadata.kv_slots)] == [length] * 3
    for row in (metadata.positions, metadata.kv_slots):
        assert (row.data_ptr() - token_ids.data_ptr()) % (
            8 * ROW_ALIGNMENT
        ) == 0 and row.is_contiguous()


def test_a_chunk_behind_its_slots_pages_is_nobodys(rows: RowBuilder) -> None:
    with pytest.raises(AssertionError, match="pages"):
        rows.build(chunks_of((2, 39, 2)), None)


def test_the_host_has_the_rows_that_it_has_written_sent_or_not() -> None:
    table = BlockTable(SeqSlotManager(2), 5, CPU)
    table.write(1, [5, 6, 7], 0)
    assert table.host_rows[1].tolist() == [5, 6, 7, 0, 0, 0] and not any(table.host_rows[0])
    table.write(1, [5, 6, 9, 8], 2)
    table.write(0, [1], 0)
    table.flush()
    assert [table.host_rows[slot].tolist() for slot in range(3)] == table.device_rows.tolist()


def test_numbers_of_an_array_arrive_and_where_they_are_wanted() -> None:
    place = torch.zeros(5, dtype=torch.int64)
    assert to_device(array("q", [3, -(2**63), 4]), CPU).tolist() == [3, -(2**63), 4]
    assert to_device(array("q", [3, 4]), CPU, place[1:3]).data_ptr() == place[1:].data_ptr()
    assert place.tolist() == [0, 3, 4, 0, 0]


class Launched(Exception):
    """The graph would run now."""


class Counted(TorchDispatchMode):
    """Operations of torch, views of tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("number", [1, MAX_CHUNKS])
@pytest.mark.parametrize("mode", ["plain", "eagle3"])
def test_few_operations_are_done_before_a_prompts_graph_is_launched_and_slots_are_written_after_it(
    mode: str,
    number: int,
    tiny: Path,
    tmp_path: Path,
    eager_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2)
    harness = Harness(tiny, **one_model(tiny, head, mode))
    runner, random = harness.parts.runner, Random(3)
    old = runner.engine.attention.groups[0].backend
    flashinfer = FlashInferAttention(old.geometry, old.pool, PlainPrefill(old.geometry))
    group = PagedGroup(flashinfer, runner.engine.rows)
    runner.engine.attention = AttentionGroups([group])
    with torch.inference_mode():
        runner.context_graphs = capture_contexts(runner.engine, (256,), 8, GraphPool(CPU))
    assert runner.context_graphs is not None

    def fail(*_: Any) -> None:
        raise Launched

    graph: Any = runner.context_graphs._graphs[256].graph
    monkeypatch.setattr(graph, "replay", fail)
    monkeypatch.setattr(PlainInPlace, "plan", lambda plan, rows: plan)
    for written_after in (SamplingState, type(harness.parts.slots)):
        monkeypatch.setattr(written_after, "start", fail)
    for _ in range(number):
        harness.submit(random.choices(range(64), k=200 // number), max_tokens=9)
    with pytest.raises(Launched) as launched, Counted() as counted:
        harness.executor.step()
    assert launched.traceback[-2].name == "run"  # of the graphs
    # Page numbers, the graph's inputs, and the plan's numbers: three copies and the views around
    # them.
    assert sum(counted.seen.values()) <= 11, counted.seen
