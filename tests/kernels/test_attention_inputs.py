"""What attention reads and what follows it: spans of keys, rows and pages of chunks, and the factor
of sinks."""

import math
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.tree_problem import bits_of
from tllm_spec.kernels.attention.attention_sinks import add_sinks
from tllm_spec.kernels.attention.paged_prefill import PrefillRows
from tllm_spec.kernels.attention.visible_keys import KeySpan, KeySpans, TreeMask


def test_a_row_of_a_tree_keeps_the_keys_of_its_path_that_its_span_has() -> None:
    # Position 14 is before the region; the region's first key has position 15.
    paths = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 1, 2, 63]]
    positions = torch.tensor([15, 16, 17, 16, 18])
    mask = TreeMask(torch.tensor([bits_of(paths)]), 64)
    for size, kept in {
        16: [[0], [1], [1, 2], [3], [1, 2, 63]],
        17: [[0], [0, 1], [2], [0, 3], [2, 63]],
        1: [[0], [1], [2], [3], [63]],
        15: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=False), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]
    for size, kept in {
        1: [[0], [1], [2], [3], [63]],
        2: [[0], [0, 1], [1, 2], [0, 3], [2, 63]],
        4: paths,
    }.items():
        spans = KeySpans(KeySpan(size, slides=True), positions)
        assert spans.cut(mask).bits.tolist() == [bits_of(kept)]


@pytest.mark.parametrize("slides", [False, True], ids=["chunks", "sliding"])
def test_the_first_key_is_the_same_on_the_host_and_on_the_device(slides: bool) -> None:
    span, positions = KeySpan(16, slides=slides), [0, 14, 15, 16, 17, 40]
    found = KeySpans(span, torch.tensor(positions)).first_keys().tolist()
    assert found == [span.first_key(position) for position in positions]
    assert found == ([0, 0, 0, 1, 2, 25] if slides else [0, 0, 0, 16, 16, 32])


BATCHES = {
    "one token": ([1], [1]),
    "a full page": ([4], [4]),
    "chunks after prefixes": ([7, 1, 129], [300, 8, 129]),
    "ends at and around page ends": ([1, 2, 3, 4, 5], [15, 16, 17, 32, 33]),
}


def expected(
    chunk_lens: list[int], kv_lens: list[int], tables: list[list[int]], page_size: int
) -> Iterator[list[int]]:
    """Row starts, page starts, tokens in the last page, and pages, counted token by token."""
    rows, starts, last, pages = [0], [0], [], []
    for chunk_len, kv_len, table in zip(chunk_lens, kv_lens, tables, strict=True):
        rows.append(rows[-1] + chunk_len)
        own: list[list[int]] = []
        for token in range(kv_len):
            if token % page_size == 0:
                own.append([])
            own[-1].append(token)
        pages += table[: len(own)]
        starts.append(len(pages))
        last.append(len(own[-1]))
    yield from (rows, starts, last, pages)


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("name", BATCHES)
def test_rows_and_pages_equal_those_of_a_plain_loop(name: str, page_size: int) -> None:
    chunk_lens, kv_lens = BATCHES[name]
    width = -(-max(kv_lens) // page_size) + 2  # the longest row has spare pages, too
    tables = torch.randperm((len(kv_lens) + 1) * width).view(-1, width).to(torch.int32)
    rows = PrefillRows.build(
        chunk_lens, kv_lens, tables, page_size
    )  # the last row of the tables is a window's
    found = [rows.query_starts, rows.page_starts, rows.last_page_lens, rows.pages]
    assert all(
        tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in [*found, rows.kv_lens]
    )
    assert [tensor.tolist() for tensor in found] == list(
        expected(chunk_lens, kv_lens, tables[:-1].tolist(), page_size)
    )
    assert rows.kv_lens.tolist() == kv_lens
    assert (rows.num_rows, rows.max_chunk_len) == (sum(chunk_lens), max(chunk_lens))


def check(device: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, heads, 7, generator=generator, dtype=torch.float64) * 3
    scores[1] = -torch.inf  # a row without keys
    values = torch.randn(5, heads, 7, head_dim, generator=generator, dtype=torch.float64)
    sinks = torch.linspace(-3, 8, heads)
    weights = scores.softmax(-1).nan_to_num(0)
    room = torch.zeros(5, heads + 1, head_dim, device=device, dtype=dtype)
    output = room[:, 1:].copy_((weights.unsqueeze(2) @ values).squeeze(2))
    log_sums = (scores.logsumexp(-1) / math.log(2)).float().to(device)
    add_sinks(output, log_sums, sinks.to(device))
    wide = torch.cat((scores, sinks.double().expand(5, -1).unsqueeze(2)), -1).softmax(-1)
    expected = (wide[..., :-1].unsqueeze(2) @ values).squeeze(2)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=rounding, atol=rounding)
    assert room[:, 0].count_nonzero() == 0


def test_the_reference_equals_the_softmax_with_one_more_score() -> None:
    check("cpu", 6, 16, torch.float32)


@on_each_kernel_device
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 16), (64, 64), (5, 80), (3, 256)])
def test_the_kernel_equals_the_softmax_with_one_more_score(
    heads: int, head_dim: int, device: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(device, heads, head_dim, dtype)
