"""Batch-invariant attention: rows of chunks and windows have the same bits in every batch, and rows
of draft trees those that their token has in a chain. Under Triton's interpreter in a subprocess,
and on a CUDA device (`-m gpu`)."""

import math
from dataclasses import dataclass

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.attention.batch_invariant_attention import (
    MAX_PARTIAL_ROWS,
    SPLIT_KEYS,
    QueryTiles,
    batch_invariant_attention,
    launch_attention,
    tokens_per_tile,
)
from tllm_spec.kernels.attention.visible_keys import KeySpan, TreeMask, TreePaths
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.dispatch import has_kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Heads:
    """`group`: query heads per KV head; a tile has 64 // group tokens."""

    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype = torch.float32
    span: KeySpan | None = None
    has_sinks: bool = False


LENGTH = 2 * SPLIT_KEYS + 21
CHUNK = 28
FIRST = LENGTH - CHUNK  # the longest chunk has full tiles, a partial one, and three splits

CASES = {
    "an 8B Llama's group": Heads(4, 2, 128, 32, torch.bfloat16),
    "small heads": Heads(3, 1, 16, 4),
    "odd": Heads(5, 1, 80, 16, torch.float16),
    "a head each": Heads(1, 1, 32, 1),
    "more heads than a tile has rows": Heads(70, 1, 16, 64),
    "chunks": Heads(3, 1, 16, 4, span=KeySpan(LENGTH - 14, slides=False)),
    "sliding": Heads(3, 1, 16, 4, span=KeySpan(SPLIT_KEYS + 40, slides=True)),
    "sinks": Heads(8, 2, 64, 16, torch.bfloat16, has_sinks=True),
    "sinks of a sliding window": Heads(
        3, 1, 16, 4, span=KeySpan(SPLIT_KEYS + 40, slides=True), has_sinks=True
    ),
    "short windows of small heads": Heads(3, 1, 16, 4, span=KeySpan(9, slides=True)),
    "short chunks": Heads(5, 1, 80, 16, torch.float16, span=KeySpan(9, slides=False)),
    "short chunks of small heads": Heads(3, 1, 16, 4, span=KeySpan(9, slides=False)),
}
QUICK_CASES = [
    "sinks of a sliding window",
    "small heads",
    "chunks",
    "short chunks of small heads",
    "sliding",
]


class Cache:
    """Requests of LENGTH tokens with a query for every token, on shuffled pages of a pool. The rest
    of the pool is NaN, and the last column of the block tables names a page of NaN."""

    def __init__(self, heads: Heads, device: str = "cpu") -> None:
        dtype, requests = heads.dtype, 2
        self.heads, self.device, self.scale = (
            heads,
            torch.device(device),
            1.3 / math.sqrt(heads.head_dim),
        )
        generator = torch.Generator().manual_seed(0)
        count = -(-LENGTH // heads.page_size)
        pages = torch.randperm(requests * count, generator=generator) + 1
        shape = (2, requests * count + 1, heads.page_size, heads.kv_heads, heads.head_dim)
        layer = torch.full(shape, torch.nan)
        self.kv = torch.randn(requests, 2, LENGTH, *shape[3:], generator=generator).to(dtype)
        tables = torch.zeros(requests, count + 1, dtype=torch.int32)
        tables[:, :count] = pages.view(requests, count)
        for own, table in zip(self.kv, tables, strict=True):
            slots = [int(table[i // shape[2]]) * shape[2] + i % shape[2] for i in range(LENGTH)]
            layer.view(2, -1, *shape[3:])[:, slots] = own.float()
        queries = heads.group * heads.kv_heads
        self.q = torch.randn(requests, LENGTH, queries + 3, heads.head_dim, generator=generator).to(
            device, dtype
        )
        self.q = self.q[:, :, 1 : queries + 1]
        self.layer, self.tables = layer.to(device, dtype), tables.to(device)
        self.sinks = torch.linspace(-1, 5, queries, device=device) if heads.has_sinks else None
        self.results = WindowWorkspace.allocate(heads.head_dim, self.device, MAX_PARTIAL_ROWS)
        self.results.outputs.fill_(torch.nan)
        self.results.log_sums.fill_(torch.nan)

    @property
    def size(self) -> int:
        return tokens_per_tile(self.heads.group)

    def chunk(self, start: int, length: int, spreads: bool, request: int = 0) -> torch.Tensor:
        """Results of consecutive tokens of one request, `[n, Hq * D]`."""
        tiles = QueryTiles.of_chunk(0, start, length, request, self.size, self.device)
        q, results = self.q[request, start : start + length], self.results if spreads else None
        own = self.layer, self.tables, tiles, self.scale, results
        return launch_attention(q, *own, self.heads.span, sinks=self.sinks)

    def mixed(self, counts: tuple[int, int]) -> tuple[list[slice], torch.Tensor]:
        """One launch of a chunk of the first request and windows of both, with so many rows: the
        tokens, and their results."""
        ends = LENGTH - 3, SPLIT_KEYS + counts[1]
        kv_lens = torch.tensor(ends, dtype=torch.int32, device=self.device)
        rows = rows_of(counts, device=str(self.device))
        parts = [
            QueryTiles.of_chunk(0, 21, CHUNK, 0, self.size, self.device),
            QueryTiles.of_windows(CHUNK, kv_lens, rows, 1, self.size),
        ]
        tables = self.tables[[0, 0, 1]]
        tokens = [
            slice(21, 21 + CHUNK),
            *(slice(end - n, end) for end, n in zip(ends, counts, strict=True)),
        ]
        q = torch.cat([self.q[r, own] for r, own in zip((0, 0, 1), tokens, strict=True)])
        tiles = QueryTiles.joined(parts)
        return tokens, batch_invariant_attention(
            *(q, self.layer, tables, tiles, self.scale, self.results, self.heads.span),
            sinks=self.sinks,
        )

    def expected(self, request: int, tokens: slice) -> torch.Tensor:
        """softmax(scale * q k) v of some tokens, `[n, Hq * D]` float64."""
        keys, values = self.kv[request].double().repeat_interleave(self.heads.group, dim=2)
        scores = (
            torch.einsum("qhd,khd->hqk", self.q[request, tokens].cpu().double(), keys) * self.scale
        )
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        if (span := self.heads.span) is not None:
            first_keys = torch.tensor([span.first_key(position) for position in range(LENGTH)])
            hidden |= torch.arange(LENGTH) < first_keys[:, None]
        hidden = hidden[tokens]
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.cpu().double().view(-1, 1, 1).expand(-1, scores.shape[1], -1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., :LENGTH]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def check(output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_the_formula(name: str) -> None:
    cache = Cache(CASES[name])
    tokens, output = cache.mixed((3, 5))
    expected = [cache.expected(r, own) for r, own in zip((0, 0, 1), tokens, strict=True)]
    check(output, torch.cat(expected))


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True], ids=["together", "spread"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_formula_and_its_reference(
    name: str, spreads: bool, device: str
) -> None:
    assert has_kernels(torch.device(device))
    cache = Cache(CASES[name], device)
    for start, length in ((0, 3), (SPLIT_KEYS - 2, 4), (LENGTH - 1, 1)):
        output = cache.chunk(start, length, spreads, request=1)
        check(output, cache.expected(1, slice(start, start + length)))
        tiles = QueryTiles.of_chunk(0, start, length, 1, cache.size, cache.device)
        q = cache.q[1, start : start + length]
        reference = batch_invariant_attention.reference(
            *(q, cache.layer, cache.tables, tiles, cache.scale, None, cache.heads.span),
            sinks=cache.sinks,
        )
        check(output, reference.cpu().double())


@on_each_kernel_device
@pytest.mark.parametrize("name", QUICK_CASES if INTERPRETED else CASES)
def test_a_token_has_the_same_bits_in_every_chunk_and_window(name: str, device: str) -> None:
    cache = Cache(CASES[name], device)
    expected = cache.chunk(FIRST, LENGTH - FIRST, spreads=False)
    for start, length, spreads in (
        (FIRST, 3, True),
        (FIRST + 7, 1, True),
        (FIRST + 9, 8, False),
        (LENGTH - 25, 25, True),
    ):
        found = cache.chunk(start, length, spreads)
        assert torch.equal(found, expected[start - FIRST :][:length]), (start, length, spreads)
    for counts in ((1, 1), (4, 4), (1, 3)):
        tokens, found = cache.mixed(counts)
        firsts = 0, CHUNK, CHUNK + counts[0]
        for first, own, request in zip(firsts, tokens, (0, 0, 1), strict=True):
            alone = cache.chunk(own.start, own.stop - own.start, spreads=True, request=request)
            assert torch.equal(found[first : first + len(alone)], alone), (counts, own)
        assert torch.equal(
            found[CHUNK : firsts[2]], expected[tokens[1].start - FIRST :][: counts[0]]
        )


@on_each_kernel_device
def test_the_width_of_the_block_table_changes_no_bit(device: str) -> None:
    cache = Cache(CASES["small heads"], device)
    expected = cache.chunk(60, 10, spreads=True)
    assert torch.equal(expected, cache.chunk(60, 10, spreads=False))
    for width in (18, 40, cache.tables.shape[1]):
        tables, cache.tables = cache.tables, cache.tables[:, :width]
        assert torch.equal(cache.chunk(60, 10, spreads=True), expected), width
        cache.tables = tables


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True], ids=["together", "spread"])
def test_padding_rows_are_finite_and_queries_before_the_first_token_give_zeros(
    spreads: bool, device: str
) -> None:
    cache = Cache(CASES["a head each"], device)
    cache.layer[:, 0] = 7  # the dummy page
    kv_lens = torch.tensor([2, 10**9], dtype=torch.int32, device=device)
    tiles = QueryTiles.of_windows(0, kv_lens, rows_of([70] * len(kv_lens)), 0, cache.size)
    q = torch.cat((cache.q[0, :70], cache.q[1, :70]))
    results = cache.results if spreads else None
    output = launch_attention(
        q, cache.layer, torch.zeros_like(cache.tables), tiles, cache.scale, results
    )
    assert output.isfinite().all() and output[:68].count_nonzero() == 0
    torch.testing.assert_close(output[68:], torch.full_like(output[68:], 7.0))


# The region crosses the end of a split.
REGION = 2 * SPLIT_KEYS - 5
NUM_KEYS = LENGTH - REGION


class Tree:
    """The last rows of a random tree whose region ends one request of `cache`."""

    def __init__(self, cache: Cache, window: int, seed: int) -> None:
        self.cache, self.window = cache, window
        generator = torch.Generator().manual_seed(seed)
        self.paths = random_paths(NUM_KEYS, generator)[-window:]
        # One long path, so that rows of the tile end in different splits.
        self.paths[-1] = list(range(NUM_KEYS))

    def run(self, spreads: bool) -> torch.Tensor:
        """`[R, Hq * D]`."""
        cache, device = self.cache, self.cache.device
        mask = TreeMask(torch.tensor([bits_of(self.paths)], device=device), NUM_KEYS)
        kv_lens = torch.tensor([LENGTH], dtype=torch.int32, device=device)
        tiles = QueryTiles.of_trees(kv_lens, mask, 0, cache.size)
        q, results = cache.q[0, -self.window :], cache.results if spreads else None
        own = cache.layer, cache.tables, tiles, cache.scale, results
        return launch_attention(q, *own, cache.heads.span, sinks=cache.sinks)

    def chain(self, row: int) -> torch.Tensor:
        """The row's result after its path, written one key after another, `[Hq * D]`."""
        cache, path = self.cache, self.paths[row]
        layer, size = cache.layer.clone(), cache.heads.page_size

        def slot(position: int) -> int:
            return int(cache.tables[0, position // size]) * size + position % size

        old, new = cache.layer.flatten(1, 2), layer.flatten(1, 2)
        new[:, [slot(position) for position in range(REGION, LENGTH)]] = torch.nan
        targets = [slot(REGION + depth) for depth in range(len(path))]
        new[:, targets] = old[:, [slot(REGION + key) for key in path]]
        q = cache.q[0, LENGTH - self.window + row][None]
        end = REGION + len(path)
        tiles = QueryTiles.of_chunk(0, end - 1, 1, 0, cache.size, cache.device)
        layer = new.view_as(layer)
        own = layer, cache.tables, tiles, cache.scale, None
        return launch_attention(q, *own, cache.heads.span, sinks=cache.sinks)[0]


@on_each_kernel_device
@pytest.mark.parametrize("name", QUICK_CASES if INTERPRETED else CASES)
def test_a_row_has_the_bits_of_its_token_in_a_chain_of_its_path(name: str, device: str) -> None:
    cache = Cache(CASES[name], device)
    tree = Tree(cache, window=9, seed=1)
    output = tree.run(spreads=True)
    assert torch.equal(tree.run(spreads=False), output)
    for row in range(tree.window):
        assert torch.equal(output[row], tree.chain(row)), (row, tree.paths[row])


@on_each_kernel_device
def test_a_row_does_not_depend_on_the_other_rows(device: str) -> None:
    cache = Cache(CASES["small heads"], device)
    tree, other = Tree(cache, 22, seed=2), Tree(cache, 22, seed=3)  # two tiles
    other.paths[4] = tree.paths[4]
    assert torch.equal(tree.run(spreads=False)[4], other.run(spreads=False)[4])


def test_paths_hold_the_keys_of_the_bits_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    paths = [*random_paths(63, generator), [0, 7, 63]]
    found = TreePaths.of(TreeMask(torch.tensor([bits_of(paths)]), 64))
    assert found.lens.tolist() == [len(path) for path in paths]
    rows = zip(found.keys.tolist(), paths, strict=True)
    assert all(keys[: len(path)] == path for keys, path in rows)
