"""CUDA graphs of contexts: what runs in them, and that texts are those of eager rounds. The
reference of FlashInfer attends."""

from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.plain_prefill import PlainInPlace, PlainPrefill
from tests.executor.draft_caches import HOT, one_model
from tests.executor.graph_rounds import capture_rounds
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import (
    ROW_ALIGNMENT,
    AttentionGroups,
    ContextChunk,
    PagedGroup,
    RowBuilder,
)
from tllm_spec.executor.graphs.context_graphs import MAX_CHUNKS, capture_contexts, context_rows
from tllm_spec.executor.graphs.slot_graphs import GraphPool, graph_keys
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import BlockTable, SeqSlotManager
from tllm_spec.executor.sampling.row_group import SamplingState
from tllm_spec.kernels.attention.paged_prefill import PrefillRows

CPU = torch.device("cpu")
DUMMY = 8  # the slot after those of max_batch_size
MODES = ["plain", "draft_target", "eagle3", "eagle3_two_model", "draft_target_two_model"]
SIZES = (4, 8, 24, 40)


def speculate(tiny_draft: Path, head: Path, mode: str) -> dict[str, Any]:
    if mode == "draft_target_two_model":
        return draft_target(tiny_draft, 3)
    return one_model(tiny_draft, head, mode)


def with_graphs(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    windows: tuple[int, ...] = (),
    *,
    sizes: tuple[int, ...] = SIZES,
    **options: Any,
) -> Harness:
    """A harness with graphs of contexts, and of rounds of so many windows."""
    harness = Harness(model, **options)
    runner, pool = harness.parts.runner, GraphPool(CPU)
    old = runner.engine.attention.groups[0].backend
    flashinfer = FlashInferAttention(old.geometry, old.pool, PlainPrefill(old.geometry))
    group = PagedGroup(flashinfer, runner.engine.rows)
    runner.engine.attention = AttentionGroups([group])
    draft_lens = {0, harness.max_draft_len}
    with torch.inference_mode():
        runner.context_graphs = capture_contexts(runner.engine, sizes, DUMMY, pool)
    if windows:
        capture_rounds(harness, graph_keys(windows, lambda _: draft_lens), pool=pool)
    return harness


def replays(harness: Harness) -> dict[int, int]:
    """By number of rows."""
    graphs = harness.parts.runner.context_graphs
    assert graphs is not None
    dummies: dict[int, Any] = {
        size: captured.graph for (size, _), captured in graphs._graphs.items()
    }
    return {size: stand_in.replays for size, stand_in in dummies.items() if stand_in.replays}


def traffic(harness: Harness, is_sampled: bool) -> list[LlmRequest]:
    """Prompts of all lengths that join generating requests; some have a common prefix."""
    random = Random(5)
    shared = [random.randrange(64) for _ in range(40)]
    requests = []
    for i, length in enumerate((3, 1, 24, 8, 9, 40, 41, 30, 2, 23, 60, 5)):
        prompt = [random.randrange(64) for _ in range(length)]
        requests.append(
            harness.submit(
                shared[:35] + prompt if i % 4 == 3 else prompt,
                max_tokens=4 + 3 * i,
                temperature=HOT if is_sampled and i % 2 else None,
                presence_penalty=0.3 if i == 6 else 0.0,
                prompt_logprobs=2 if i == 4 else None,
                seed=i,
            )
        )
        harness.rounds(i % 3)
    harness.run()
    return requests


def ranks(request: LlmRequest) -> list[dict[int, int | None] | None]:
    """The ranks of prompt tokens, where they were asked for."""
    found = request.prompt_logprobs
    return [entry and {token: each.rank for token, each in entry.items()} for entry in found]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", [{}, {"enable_chunked_prefill": True, "max_num_tokens": 45}], ids=str
)
@pytest.mark.parametrize("windows", [(), (4, 8)], ids=["eager windows", "windows in graphs"])
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_without_graphs(
    mode: str,
    windows: tuple[int, ...],
    options: dict[str, Any],
    is_sampled: bool,
    tiny: Path,
    tiny_draft: Path,
    head: Path,
    eager_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options | speculate(tiny_draft, head, mode)
    harness, eager = with_graphs(monkeypatch, tiny, windows, **options), Harness(tiny, **options)
    ours, theirs = traffic(harness, is_sampled), traffic(eager, is_sampled)
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_accepted == other.counters.by_accepted
        assert mine.error is None
        assert ranks(mine) == ranks(other)
    assert len(replays(harness)) >= 3
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", ["plain", "eagle3", "eagle3_two_model"])
def test_a_prompt_with_windows_is_two_graph_launches(
    mode: str,
    tiny: Path,
    tiny_draft: Path,
    head: Path,
    eager_graphs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = with_graphs(monkeypatch, tiny, (4,), **speculate(tiny_draft, head, mode))
    runner = harness.parts.runner

    def fail(*anything: Any) -> None:
        raise AssertionError("no forward is launched kernel by kernel")

    monkeypatch.setattr(runner, "_launch_together", fail)
    monkeypatch.setattr(runner.decode, "batch_windows", fail)
    requests = []
    for length in (20, 3, 9):
        requests.append(harness.submit(list(range(length)), max_tokens=30))
        harness.rounds(3)
    harness.run()
    assert [len(output_of(request)) for request in requests] == [30] * 3
    assert sum(replays(harness).values()) == 3


def test_the_smallest_graph_that_has_room_runs_a_forward(
    tiny: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = with_graphs(monkeypatch, tiny, kv_cache_config={"enable_block_reuse": False})
    sizes = {1: 4, 4: 4, 5: 8, 23: 24, 24: 24, 25: 40, 40: 40, 41: None}
    for length, size in sizes.items():
        before = replays(harness)
        harness.submit([7] * length, max_tokens=1)
        harness.run()
        after = replays(harness)
        assert {key for key in after if after[key] != before.get(key)} == (
            {size} if size else set()
        )


def test_states_are_those_of_an_eager_forward_for_any_chunks(
    tiny: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one after another: what an earlier replay left in the buffers is not read."""
    harness = with_graphs(monkeypatch, tiny)
    runner, random = harness.parts.runner, Random(1)
    graphs, engine = runner.context_graphs, runner.engine
    assert graphs is not None
    table = harness.parts.kv.groups[0].table
    with torch.inference_mode():
        for slot in range(DUMMY):
            table.write(slot, list(range(1 + 4 * slot, 5 + 4 * slot)), 0)
        table.flush()
        for lens in ((40,), (1,), (3, 1), (1,) * MAX_CHUNKS, (5, 2, 30), (8,)):
            chunks = [
                ContextChunk(slot, 0, random.choices(range(64), k=n)) for slot, n in enumerate(lens)
            ]
            last = torch.tensor(lens).cumsum(0) - 1
            expected = engine.forward(chunks, None, last)
            keys = engine.attention.groups[0].backend.pool.data.clone()
            engine.attention.groups[0].backend.pool.data[:, :, 1:].zero_()
            found = graphs.run(chunks)
            assert found is not None
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
            for slot, n in enumerate(lens):  # page 0 is the padding's
                own, other = (
                    pool[:, :, 1 + 4 * slot : 5 + 4 * slot].flatten(2, 3)[:, :, :n]
                    for pool in (engine.attention.groups[0].backend.pool.data, keys)
                )
                torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
        assert graphs.run([ContextChunk(0, 0, [1])] * (MAX_CHUNKS + 1)) is None


def test_contexts_are_captured_unless_that_is_disabled(tiny: Path) -> None:
    def sizes(**options: Any) -> tuple[int, ...]:
        plan = BuildPlan(
            LlmArgs.from_kwargs(tiny, **{"max_batch_size": 8, "max_seq_len": 252} | options)
        )
        plan.device = torch.device("cuda")
        return plan.context_rows

    assert (
        sizes() == sizes(prefill_cuda_graph_backend="auto") == (64, 128)
    )  # a page has more positions than a request
    assert sizes(max_num_tokens=100) == (64,)
    assert not sizes(prefill_cuda_graph_backend="disabled") and not sizes(cuda_graph_config=None)
    assert not BuildPlan(LlmArgs.from_kwargs(tiny, max_batch_size=8, max_seq_len=256)).context_rows
    with pytest.raises(ValueError, match="prefill_cuda_graph_backend"):
        LlmArgs.from_kwargs(tiny, prefill_cuda_graph_backend="piecewise")


def test_sizes_are_those_that_rounds_and_the_padding_can_have() -> None:
    assert context_rows(8192, 100_000) == (64, *range(128, 1537, 128))
    assert context_rows(300, 100_000) == context_rows(8192, 300) == (64, 128, 256)
    assert context_rows(8192, 63) == ()


def test_attention_that_cannot_be_captured_has_no_graphs(tiny: Path, eager_graphs: None) -> None:
    runner = Harness(tiny).parts.runner
    assert capture_contexts(runner.engine, SIZES, DUMMY, GraphPool(CPU)) is None


def test_running_out_of_memory_while_capturing_says_what_to_do(
    tiny: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pool: GraphPool, work: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(GraphPool, "capture", fail)
    with pytest.raises(
        ValueError, match=r"of 40 context rows .* prefill_cuda_graph_backend to disabled"
    ):
        with_graphs(monkeypatch, tiny)


# What the host does before a prompt's forward begins, which the device waits for: the numbers of
# its rows against a plain loop, and how many operations of torch there are. They are counted, not
# timed.


NUM_PAGES, PAGE_SIZE, CONTEXT_ROWS_DUMMY = 40, 4, 3
TABLES = {0: [7, 3, 39, 1, 12], 1: [2, 30], 2: list(range(20, 30)), CONTEXT_ROWS_DUMMY: [0] * 10}
CHUNKS = [
    (0, 0, 20),
    (1, 5, 3),
    (2, 3, 30),
    (1, 0, 1),
    (CONTEXT_ROWS_DUMMY, 0, 9),
    (CONTEXT_ROWS_DUMMY, 0, 0),
]


@pytest.fixture
def rows() -> RowBuilder:
    table = BlockTable(SeqSlotManager(CONTEXT_ROWS_DUMMY), 10, CPU)
    for slot, pages in TABLES.items():
        if slot != CONTEXT_ROWS_DUMMY:  # it has page 0 though no window writes there
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


@pytest.mark.covering
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
    harness = with_graphs(monkeypatch, tiny, sizes=(256,), **one_model(tiny, head, mode))
    runner, random = harness.parts.runner, Random(3)
    assert runner.context_graphs is not None

    def fail(*_: Any) -> None:
        raise Launched

    graph: Any = runner.context_graphs._graphs[256, False].graph
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
