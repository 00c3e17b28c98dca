"""Batch-invariant attention over latents: the formula, and that a token's bits do not depend on its
chunk, window or tree, the other rows, or whether splits are spread. Under Triton's interpreter in a
subprocess, and on a CUDA device (`-m gpu`)."""

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tests.kernels.row_counts import rows_of
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.attention.batch_invariant_attention import SPLIT_KEYS, QueryTiles
from tllm_spec.kernels.attention.batch_invariant_latent import (
    TREE_TOKENS,
    batch_invariant_latent,
    latent_tokens_per_tile,
    launch_latent,
)
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.gemm.head_gemm import head_gemm

PAGE_SIZE, SCALE, NOPE = 8, 0.2, 6
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# Two splits or three: the interpreter takes long for each key.
LENGTH = (1 if INTERPRETED else 2) * SPLIT_KEYS + 21


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int = 24
    rope: int = 8
    dtype: torch.dtype = torch.float32


SHAPES = {
    "three tokens in a tile": Shape(5),
    "a token in a tile": Shape(16, dtype=torch.bfloat16),
    "two tiles for a token": Shape(17),
    "DeepSeek's": Shape(16, 512, 64, torch.bfloat16),
}
BITS = ["three tokens in a tile", "two tiles for a token"] if INTERPRETED else SHAPES


class Cache:
    """Requests of LENGTH tokens with a query for every token, on shuffled pages of a pool. The rest
    of the pool is NaN."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        shape, generator = SHAPES[name], torch.Generator().manual_seed(0)
        self.shape, self.device, width = shape, torch.device(device), shape.rank + shape.rope
        count = -(-LENGTH // PAGE_SIZE)
        pages = torch.randperm(2 * count, generator=generator) + 1
        layer = torch.full((2 * count + 1, PAGE_SIZE, width), torch.nan)
        self.entries = torch.randn(2, LENGTH, width, generator=generator).to(shape.dtype)
        self.tables = pages.view(2, count).to(device, torch.int32)
        for request, own in enumerate(self.entries):
            layer.view(-1, width)[self.slots(request)[:LENGTH].cpu()] = own.float()
        self.layer = layer.to(device, shape.dtype)
        size = 2, LENGTH, shape.heads
        q = torch.randn(*size, NOPE + shape.rope, generator=generator)
        absorbed = torch.randn(*size, shape.rank, generator=generator)
        self.q, self.absorbed = q.to(device, shape.dtype), absorbed.to(device, shape.dtype)
        outputs = torch.full((1 << 13, shape.rank), torch.nan, device=device)
        self.results = WindowWorkspace(outputs, outputs[:, 0].clone())
        self.size = latent_tokens_per_tile(shape.heads)

    def slots(self, request: int) -> torch.Tensor:
        offsets = torch.arange(PAGE_SIZE, device=self.tables.device)
        return (self.tables[request, :, None].long() * PAGE_SIZE + offsets).flatten()

    def run(
        self, rows: list[slice], tiles: QueryTiles, spreads: bool | None, requests: list[int]
    ) -> torch.Tensor:
        """`[T, H, R]`. spreads: None chooses."""
        pairs = list(zip(requests, rows, strict=True))
        q_latent = torch.cat([self.absorbed[request, own] for request, own in pairs])
        q = torch.cat([self.q[request, own] for request, own in pairs])
        given = q_latent, q, self.layer, self.tables[requests], tiles, SCALE
        if spreads is None:
            return batch_invariant_latent(*given, self.results)
        return launch_latent(*given, self.results if spreads else None)

    def chunk(self, start: int, length: int, spreads: bool = False) -> torch.Tensor:
        tiles = QueryTiles.of_chunk(0, start, length, 0, self.size, self.device)
        return self.run([slice(start, start + length)], tiles, spreads, [0])

    def expected(self, request: int, rows: slice) -> torch.Tensor:
        rank, entries = self.shape.rank, self.entries[request].float()
        queries = torch.cat((self.absorbed, self.q[..., NOPE:]), -1)[request, rows].float().cpu()
        scores = torch.einsum("qhd,kd->hqk", queries, entries) * SCALE
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[rows]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,kr->qhr", weights, entries[:, :rank])


def test_the_reference_equals_the_formula() -> None:
    cache = Cache("three tokens in a tile")
    tiles = QueryTiles.of_chunk(0, 50, 7, 0, cache.size, cache.device)
    rows = slice(50, 57)
    given = cache.absorbed[0, rows], cache.q[0, rows], cache.layer, cache.tables, tiles, SCALE
    found = batch_invariant_latent.reference(*given, None)
    torch.testing.assert_close(found, cache.expected(0, rows), rtol=1e-5, atol=2e-5)


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True], ids=["together", "spread"])
@pytest.mark.parametrize("name", list(SHAPES)[:3] if INTERPRETED else SHAPES)
def test_the_kernel_equals_the_formula(name: str, spreads: bool, device: str) -> None:
    cache = Cache(name, device)
    tolerance = TOLERANCE[cache.shape.dtype]
    for start, length in ((0, 4), (SPLIT_KEYS - 2, 4), (LENGTH - 1, 1)):
        found = cache.chunk(start, length, spreads).float().cpu()
        expected = cache.expected(0, slice(start, start + length))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@on_each_kernel_device
@pytest.mark.parametrize("name", BITS)
def test_a_token_has_the_same_bits_in_every_chunk_and_window(name: str, device: str) -> None:
    cache, first = Cache(name, device), LENGTH - 8
    expected = cache.chunk(first, 8)
    for start, length, spreads in ((first, 3, True), (first + 4, 1, True), (first + 1, 5, False)):
        found = cache.chunk(start, length, spreads)
        assert torch.equal(found, expected[start - first :][:length]), (start, length, spreads)
    kv_lens = torch.tensor([LENGTH - 1, LENGTH], dtype=torch.int32, device=device)
    for counts in ((1, 1), (4, 4), (3, 1)):
        tiles = QueryTiles.of_windows(0, kv_lens, rows_of(counts, 1, device), 0, cache.size)
        rows = [slice(int(end) - n, int(end)) for end, n in zip(kv_lens, counts, strict=True)]
        found = cache.run(rows, tiles, None, [0, 1])
        assert torch.equal(found[: counts[0]], expected[7 - counts[0] : 7])


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True], ids=["together", "spread"])
@pytest.mark.parametrize("name", BITS)
def test_a_row_of_a_tree_has_the_bits_of_its_token_in_a_chain_of_its_path(
    name: str, spreads: bool, device: str
) -> None:
    cache, window, length = Cache(name, device), 6, 26
    region = LENGTH - length  # it begins before the end of a split
    paths = random_paths(length, torch.Generator().manual_seed(1))[-window:]
    paths[-1] = list(range(length))
    mask = TreeMask(torch.tensor([bits_of(paths)], device=device), length)
    kv_lens = torch.tensor([LENGTH], dtype=torch.int32, device=device)
    tiles = QueryTiles.of_trees(kv_lens, mask, 0, TREE_TOKENS)
    rows = [slice(LENGTH - window, LENGTH)]
    found = cache.run(rows, tiles, spreads, [0])
    reference = batch_invariant_latent.reference(
        *(cache.absorbed[0, rows[0]].cpu().float(), cache.q[0, rows[0]].cpu().float()),
        *(cache.layer.cpu().float(), cache.tables.cpu()),
        QueryTiles.of_trees(kv_lens.cpu(), TreeMask(mask.bits.cpu(), length), 0, TREE_TOKENS),
        SCALE,
        None,
    )
    tolerance = TOLERANCE[cache.shape.dtype]
    torch.testing.assert_close(found.float().cpu(), reference, rtol=tolerance, atol=tolerance)
    layer, slots = cache.layer, cache.slots(0)
    for row, path in enumerate(paths):
        cache.layer = layer.clone()
        moved = cache.layer.flatten(0, 1)
        moved[slots[region:LENGTH]] = torch.nan
        moved[slots[region : region + len(path)]] = layer.flatten(0, 1)[
            slots[[region + key for key in path]]
        ]
        end = region + len(path)
        tile = QueryTiles.of_chunk(0, end - 1, 1, 0, cache.size, cache.device)
        token = LENGTH - window + row
        alone = cache.run([slice(token, token + 1)], tile, False, [0])
        assert torch.equal(found[row], alone[0]), (row, path)


@on_each_kernel_device
def test_a_row_of_a_batch_invariant_head_gemm_has_the_same_bits_in_every_batch(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x = torch.randn(150, 2, 40, generator=generator).to(device, dtype)
    weight = torch.randn(2, 40, 72, generator=generator).to(device, dtype)
    out = x.new_empty(150, 2, 72)
    head_gemm(x, weight, out, batch_invariant=True)
    torch.testing.assert_close(
        out.float(), torch.einsum("thk,hkn->thn", x.float(), weight.float()), rtol=2e-2, atol=2e-2
    )
    for rows in (slice(0, 1), slice(70, 75), slice(100, 150)):
        own = x.new_empty(rows.stop - rows.start, 2, 72)
        head_gemm(x[rows], weight, own, batch_invariant=True)
        assert torch.equal(own, out[rows])
