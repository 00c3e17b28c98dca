"""Rows and pages of context chunks against a plain loop. tests/attention/test_flashinfer.py tests
the kernels."""

from collections.abc import Iterator

import pytest
import torch

from tllm_spec.kernels.attention.paged_prefill import PrefillRows

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
