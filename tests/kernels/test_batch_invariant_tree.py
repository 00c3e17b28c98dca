"""Rows of draft trees in batch-invariant attention have the bits that their token has in a chain.
The kernels run under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tests.kernels.test_batch_invariant_attention import (
    CASES,
    LENGTH,
    QUICK_CASES,
    SPLIT_KEYS,
    Cache,
)
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.attention.batch_invariant_attention import QueryTiles, launch_attention
from tllm_spec.kernels.attention.visible_keys import TreeMask, TreePaths

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
def test_a_row_has_the_bits_of_its_token_in_a_chain_of_its_path(
    name: str, device: str, exact_dots: None
) -> None:
    cache = Cache(CASES[name], device)
    tree = Tree(cache, window=9, seed=1)
    output = tree.run(spreads=True)
    assert torch.equal(tree.run(spreads=False), output)
    for row in range(tree.window):
        assert torch.equal(output[row], tree.chain(row)), (row, tree.paths[row])


@on_each_kernel_device
def test_a_row_does_not_depend_on_the_other_rows(device: str, exact_dots: None) -> None:
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
