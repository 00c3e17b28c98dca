"""Attention of prompts with wide heads against the formula in float64: under Triton's interpreter
in a subprocess, and on a CUDA device (`-m gpu`)."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_batch_invariant_attention import LENGTH, Cache, Heads, check
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles
from tllm_spec.kernels.attention.prompt_attention import prompt_attention, prompt_tokens_per_tile
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.dispatch import has_kernels

CASES = {
    "wide heads": Heads(2, 2, 512, 32, dtype=torch.bfloat16),
    "float16": Heads(8, 1, 512, 16, dtype=torch.float16),
    "small heads": Heads(3, 1, 24, 4),
    "sliding": Heads(3, 2, 64, 16, span=KeySpan(70, slides=True)),
    "chunks": Heads(2, 1, 32, 4, span=KeySpan(50, slides=False)),
}
PARTS = ((0, 3), (0, 90), (70, 1), (LENGTH - 40, 40))


def attended(cache: Cache, parts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Results of chunks of the second request in one launch."""
    tiles, row, heads = [], 0, cache.heads
    size = prompt_tokens_per_tile(cache.q, heads.head_dim, heads.group)
    for start, length in parts:
        tiles.append(QueryTiles.of_chunk(row, start, length, 1, size, cache.device))
        row += length
    q = torch.cat([cache.q[1, start : start + length] for start, length in parts])
    own = cache.layer, cache.tables, QueryTiles.joined(tiles), cache.scale
    return prompt_attention(q, *own, cache.heads.span)


@on_each_kernel_device
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_formula(name: str, device: str) -> None:
    assert has_kernels(torch.device(device))
    cache = Cache(CASES[name], device)
    output = attended(cache, PARTS)
    expected = [cache.expected(1, slice(start, start + length)) for start, length in PARTS]
    check(output, torch.cat(expected))


@on_each_kernel_device
@pytest.mark.interpreted("name", "sliding")
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_every_chunk(name: str, device: str) -> None:
    cache = Cache(CASES[name], device)
    whole = attended(cache, ((0, LENGTH),))
    parts = attended(cache, ((LENGTH - 5, 5), (0, 41), (41, LENGTH - 46)))
    assert torch.equal(whole, torch.cat((parts[5:], parts[:5])))
