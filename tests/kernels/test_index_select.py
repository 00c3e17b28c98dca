"""An indexer's keys and queries, and which keys it chooses."""

import pytest
import torch

from tests.kernels.interpreter import check_like_the_reference, on_each_kernel_device
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.attention import index_select as module
from tllm_spec.kernels.attention.index_select import SeenKeys, select_keys
from tllm_spec.kernels.attention.index_write import IndexNorm, index_write
from tllm_spec.kernels.attention.rotary_write import Rotary

PAGE_SIZE, SIZE, HEADS = 4, 24, 3


class Problem:
    """Rows of requests whose pages are shuffled; what a row does not see is NaN for some row. Small
    integers, so that scores are exact and many of them are equal."""

    def __init__(
        self,
        requests: list[int],
        ends: list[int],
        device: str,
        paths: list[list[int]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        self.lens = [end + (64 if paths else 0) for end in ends]
        width, number = -(-max(self.lens) // PAGE_SIZE), max(requests) + 1
        pages = torch.randperm(number * width, generator=generator).view(number, width) + 1
        layer = integers(number * width + 1, PAGE_SIZE, SIZE)
        layer[0] = torch.nan
        self.queries, self.weights = integers(len(ends), HEADS, SIZE), integers(len(ends), HEADS)
        bits = None if paths is None else torch.tensor(bits_of(paths), device=device)
        numbers = (torch.tensor(x, dtype=torch.int32, device=device) for x in (requests, ends))
        tables = pages.to(device, torch.int32), max(self.lens)
        self.seen = SeenKeys(*numbers, bits, *tables)
        self.keys = layer.view(-1, SIZE)
        self.given = self.queries.to(device, dtype), self.weights.to(device)
        self.given = *self.given, layer.to(device, dtype)
        self.paths = [[] for _ in ends] if paths is None else paths

    def choose(self, topk: int) -> list[list[int]]:
        """The slots of each row."""
        slots = self.seen.ends.new_full((len(self.seen.ends), topk), -1)
        counts = self.seen.ends.new_full((len(slots),), -1)
        select_keys(*self.given, self.seen, slots, counts)
        return [row[:count] for row, count in zip(slots.tolist(), counts.tolist(), strict=True)]

    def expected(self, topk: int) -> list[list[int]]:
        """From the definition, key by key."""
        found = []
        for row, end in enumerate(self.seen.ends.tolist()):
            table = self.seen.block_tables[self.seen.requests[row]].tolist()
            scores = []
            for position in [*range(end), *(end + key for key in self.paths[row])]:
                slot = table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                products = (self.queries[row] @ self.keys[slot]).clamp_min(0)
                scores.append((-float(products @ self.weights[row]), position, slot))
            chosen = sorted(scores)[:topk]
            found.append([slot for _, _, slot in sorted(chosen, key=lambda each: each[1])])
        return found


# What rows of several requests see: fewer keys than are chosen, as many, one more, none, and many.
ROWS = [0, 0, 0, 1, 1, 2], [5, 8, 9, 0, 150, 131]


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [8, 1, 16])
def test_higher_scores_are_chosen_and_of_equal_ones_those_of_lower_positions(
    topk: int, dtype: torch.dtype, device: str
) -> None:
    problem = Problem(*ROWS, device, dtype=dtype)
    assert problem.choose(topk) == problem.expected(topk)


@pytest.mark.parametrize("topk", [8, 1])
def test_the_reference_chooses_by_the_definition(topk: int) -> None:
    paths = random_paths(9, torch.Generator().manual_seed(3))[-6:]
    for problem in (Problem(*ROWS, "cpu"), Problem(*ROWS, "cpu", paths)):
        slots = problem.seen.ends.new_full((6, topk), -1)
        counts = slots[:, 0].clone()
        select_keys.reference(*problem.given, problem.seen, slots, counts)
        rows = zip(slots.tolist(), counts.tolist(), strict=True)
        assert [row[:count] for row, count in rows] == problem.expected(topk)


@on_each_kernel_device
@pytest.mark.parametrize("topk", [8, 3])
def test_a_node_of_a_tree_sees_its_ancestors_only(topk: int, device: str) -> None:
    paths = random_paths(64, torch.Generator().manual_seed(2))[-6:]
    problem = Problem([0, 0, 0, 1, 1, 1], [20] * 3 + [3] * 3, device, paths)
    assert problem.choose(topk) == problem.expected(topk)


@on_each_kernel_device
def test_a_choice_does_not_depend_on_the_other_rows_or_on_tiles(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows at once, in tiles of 7 rows, and keys in several blocks."""
    requests, ends = [0] * 12, list(range(140, 152))
    expected = Problem(requests, ends, device).choose(32)
    monkeypatch.setattr(module, "SCORE_BYTES", 7 * 151 * 4)
    monkeypatch.setattr(module, "SMALL_BLOCK", 64)
    monkeypatch.setattr(module, "WRITTEN_BLOCK", 32)
    monkeypatch.setattr(module, "MAX_BLOCK", 128)
    monkeypatch.setattr(module, "ROWS_OF_PROGRAM", 1)
    assert Problem(requests, ends, device).choose(32) == expected


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [3, 40, 0])
def test_keys_are_normed_and_the_first_elements_rotated(
    heads: int, dtype: torch.dtype, device: str
) -> None:
    generator, rows, rope = torch.Generator().manual_seed(0), 7, 8

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    angles = torch.rand(32, 1, rope // 2, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    positions = torch.randint(32, (rows,), generator=generator).to(device)
    rotary = Rotary(table.to(device, dtype).contiguous(), positions)
    slots = torch.randperm(40, generator=generator)[:rows].to(device)
    keys, queries = random(rows, 5 + SIZE)[:, 5:], random(rows, heads, SIZE) if heads else None
    norm, layer = IndexNorm(random(SIZE) + 1, random(SIZE), 1e-6), random(10, 4, SIZE)
    other, other_queries = layer.clone(), None if queries is None else queries.clone()
    index_write(keys, queries, rotary, slots, layer, norm)
    index_write.reference(keys, other_queries, rotary, slots, other, norm)
    if dtype == torch.float32:
        check_like_the_reference(layer, other)
    torch.testing.assert_close(layer, other, rtol=2e-2, atol=2e-2)
    if queries is not None and other_queries is not None:
        check_like_the_reference(queries, other_queries)
