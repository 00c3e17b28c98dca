"""Attention of a draft network that sees the first and the last tokens of a text: its tables have
the pages of both, whatever the chunks, windows and trees are."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.executor.engine.rows import SinkWindow
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows

PAGE, PAGES = 4, 20
CHUNKS = ((3, 3), (31, 31), (17, 52), (1, 70))  # tokens, and the length with them
KV_LENS = (2, 9, 33, 64, 80)
WINDOW = 3


def metadata_of(tree: TreeMask | None = None, *, chunks: bool = True) -> AttentionMetadata:
    """Chunks and windows of requests with pages of random numbers."""
    own = CHUNKS if chunks else ()
    rows = RoundRows.rectangle(len(KV_LENS), WINDOW)
    num_rows = sum(length for length, _ in own) + rows.num_rows
    number = len(own) + len(KV_LENS)
    return AttentionMetadata(
        context_lens=tuple(length for length, _ in own),
        context_kv_lens=tuple(end for _, end in own),
        rows=rows,
        block_tables=torch.randperm(number * PAGES, dtype=torch.int32).view(number, PAGES),
        kv_lens=torch.tensor([*(end for _, end in own), *KV_LENS], dtype=torch.int32),
        positions=torch.arange(num_rows),
        kv_slots=torch.arange(num_rows),
        max_kv_len=max(KV_LENS),
        tree=tree,
    )


def slots_of(table: torch.Tensor, number: int) -> list[int]:
    """The slots of the first tokens of a request with these pages."""
    pages = table.tolist()
    return [pages[token // PAGE] * PAGE + token % PAGE for token in range(number)]


def rows_of(metadata: AttentionMetadata, num_last: int) -> list[list[int]]:
    """The slots that each row sees; of a tree's row, those before the region, `num_last` long."""
    chunks = zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
    tables = list(metadata.block_tables)
    found = [
        slots_of(tables[chunk], end - length + 1 + row)
        for chunk, (length, end) in enumerate(chunks)
        for row in range(length)
    ]
    first = len(metadata.context_lens)
    for table, kv_len in zip(tables[first:], metadata.kv_lens[first:].tolist(), strict=True):
        own = range(1, WINDOW + 1) if metadata.tree is None else [0] * WINDOW
        found += [slots_of(table, max(0, kv_len - num_last + row)) for row in own]
    return found


def seen_by_rule(whole: list[int], first: int, sink: int, size: int) -> list[int]:
    """The slots of the sink's pages, and those from the page on that has the first of the `size`
    last tokens of the row at position `first`. whole: all slots up to the row's own."""
    end = -(-sink // PAGE) * PAGE
    start = max(0, first - size + 1) // PAGE * PAGE
    return [slot for key, slot in enumerate(whole) if key < end or key >= start]


@pytest.mark.parametrize(("sink", "size"), [(1, 1), (4, 6), (5, 13), (9, 24)])
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("region", [0, 5])
def test_a_row_sees_the_pages_of_the_first_and_of_the_last_tokens(
    region: int, chunks: bool, sink: int, size: int
) -> None:
    torch.manual_seed(sink)
    bits = torch.ones(len(KV_LENS), WINDOW, dtype=torch.int64)
    metadata = metadata_of(TreeMask(bits, region) if region else None, chunks=chunks)
    num_last = region or WINDOW
    cut = SinkWindow(sink, size).cut(metadata, PAGE)
    firsts = [
        end - length + row for length, end in (CHUNKS if chunks else ()) for row in range(length)
    ]
    firsts += [max(0, kv_len - num_last) for kv_len in KV_LENS for _ in range(WINDOW)]
    whole = rows_of(metadata, num_last)
    expected = [
        seen_by_rule(own, first, sink, size) for own, first in zip(whole, firsts, strict=True)
    ]
    assert rows_of(cut, num_last) == expected
    assert any(len(own) < len(all_of) for own, all_of in zip(expected, whole, strict=True))
    assert cut.max_kv_len >= int(cut.kv_lens[len(cut.context_lens) :].max())
    assert cut.kv_slots is metadata.kv_slots and cut.positions is metadata.positions


def test_texts_that_are_seen_whole_stay_as_they_are() -> None:
    metadata = metadata_of()
    assert SinkWindow(4, 80).cut(metadata, PAGE) is metadata


def test_a_window_of_fewer_rows_sees_the_pages_that_its_own_first_row_sees() -> None:
    metadata, counts = metadata_of(chunks=False), (1, 3, 1, 2, 1)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    window = SinkWindow(5, 7)
    part = replace(metadata, rows=RoundRows(len(counts), WINDOW, sum(counts), offsets))
    own = window.cut(part, PAGE)
    for number, count in enumerate(counts):
        rows = RoundRows.rectangle(len(counts), count)
        alone = window.cut(replace(metadata, rows=rows), PAGE)
        seen, expected = (
            slots_of(cut.block_tables[number], int(cut.kv_lens[number])) for cut in (own, alone)
        )
        assert seen == expected
