"""MLA's attention over latents, and the GEMM of each head."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import (
    INTERPRETED,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tests.kernels.row_counts import ragged_rows
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.attention import latent_attention as module
from tllm_spec.kernels.attention.latent_attention import (
    MAX_PARTIAL_ROWS,
    LatentTables,
    latent_attention,
    plain_latent_attention,
)
from tllm_spec.kernels.attention.latent_prefill import ExpandedPart, expand, expanded_attention
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.attention.window_splits import WindowWorkspace
from tllm_spec.kernels.gemm.head_gemm import MAX_ROWS, head_gemm
from tllm_spec.kernels.slots.round_rows import RoundRows

RANK, ROPE, NOPE, VALUE, PAGE_SIZE, SCALE = 48, 16, 24, 20, 8, 0.2
ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Problem:
    """Windows of requests of `kv_lens` tokens, whose pages are shuffled; what no request owns is
    NaN."""

    def __init__(
        self, kv_lens: list[int], window: int, heads: int, dtype: torch.dtype, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        batch, width = len(kv_lens), -(-max(kv_lens) // PAGE_SIZE)
        layer = torch.full((batch * width + 1, PAGE_SIZE, RANK + ROPE), torch.nan)
        tables = torch.randperm(batch * width, generator=generator).view(batch, width) + 1
        flat = layer.view(-1, RANK + ROPE)
        self.entries = []
        for pages, length in zip(tables, kv_lens, strict=True):
            positions = torch.arange(length)
            slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            flat[slots] = torch.randn(length, RANK + ROPE, generator=generator)
            self.entries.append(flat[slots])
        self.layer = layer.to(device, dtype)
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        self.tables = LatentTables(
            RoundRows.rectangle(batch, window), tables.to(device, torch.int32), lens
        )
        rows = batch * window
        self.q_latent = torch.randn(heads, rows, RANK, generator=generator).to(device, dtype)
        self.q = torch.randn(rows, heads, NOPE + ROPE, generator=generator).to(device, dtype)

    def run(self, num_processors: int) -> torch.Tensor:
        workspace = WindowWorkspace.allocate(RANK, self.q.device, MAX_PARTIAL_ROWS)
        workspace = replace(workspace, num_processors=num_processors)
        return latent_attention(self.q_latent, self.q, self.layer, self.tables, SCALE, workspace)

    def with_trees(self, offset: int) -> "Problem":
        """The windows are the last nodes of random trees of `offset` more keys."""
        length, generator = offset + self.tables.rows.window, torch.Generator().manual_seed(2)
        number = len(self.entries)
        self.paths = [random_paths(length, generator)[offset:] for _ in range(number)]
        bits = torch.tensor([bits_of(paths) for paths in self.paths], device=self.q.device)
        self.tables = replace(self.tables, tree=TreeMask(bits, length))
        return self

    def reference(self) -> torch.Tensor:
        return plain_latent_attention(self.q_latent, self.q, self.layer, self.tables, SCALE)


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests are split, too."""
    monkeypatch.setattr(module, "MIN_KEYS_PER_SPLIT", 16)


@on_each_kernel_device
@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("num_processors", [1, 40])
@pytest.mark.parametrize(
    ("kv_lens", "window", "heads"),
    [([1], 1, 1), ([70, 3, 129], 1, 16), ([40, 4, 200], 4, 16), ([33, 90], 8, 5), ([9], 3, 40)],
)
def test_windows_equal_the_reference_for_any_number_of_splits(
    kv_lens: list[int], window: int, heads: int, num_processors: int, device: str
) -> None:
    kv_lens = [max(length, window) for length in kv_lens]
    problem = Problem(kv_lens, window, heads, torch.float32, device)
    torch.testing.assert_close(
        problem.run(num_processors), problem.reference(), rtol=1e-5, atol=2e-5
    )


@on_each_kernel_device
@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("num_processors", [1, 40])
@pytest.mark.parametrize("heads", [5, 40])
def test_requests_with_different_numbers_of_rows_have_the_results_of_whole_windows(
    heads: int, num_processors: int, device: str
) -> None:
    counts, window = (1, 4, 2, 1), 4
    problem = Problem([70, 33, 129, 5], window, heads, torch.float32, device)
    expected, first = problem.reference(), window - torch.tensor(counts)
    kept = torch.tensor([i * 4 + r for i, n in enumerate(first.tolist()) for r in range(n, 4)])
    kept = kept.to(device)
    problem.tables = replace(problem.tables, rows=ragged_rows(counts, window, device))
    problem.q_latent, problem.q = problem.q_latent[:, kept].contiguous(), problem.q[kept]
    for found in (problem.run(num_processors), problem.reference()):
        torch.testing.assert_close(found, expected[:, kept], rtol=1e-5, atol=2e-5)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_windows_equal_the_reference_but_for_rounding(
    dtype: torch.dtype, device: str
) -> None:
    problem = Problem([150, 20], 4, 16, dtype, device)
    torch.testing.assert_close(
        problem.run(40).float(), problem.reference().float(), rtol=0, atol=ROUNDING[dtype]
    )


@on_each_kernel_device
def test_a_query_before_position_0_gives_zeros(device: str) -> None:
    problem = Problem([2], 1, 4, torch.float32, device)
    problem.tables = replace(problem.tables, rows=RoundRows.rectangle(1, 3))
    problem.q_latent, problem.q = problem.q_latent.repeat(1, 3, 1), problem.q.repeat(3, 1, 1)
    result = problem.run(1)
    assert not result[:, 0].any() and result[:, 1:].abs().min() > 0
    torch.testing.assert_close(result, problem.reference(), rtol=1e-5, atol=2e-5)


# Lengths, rows of each window and the keys of the tree's region before them.
TREES = [([9, 150, 33], 6, 0), ([12, 77], 3, 6), ([64, 70], 1, 63), ([64, 140], 8, 56)]


@pytest.mark.parametrize(("kv_lens", "window", "offset"), TREES)
@only_outside_the_interpreter
def test_each_row_of_a_tree_attends_to_its_own_path(
    kv_lens: list[int], window: int, offset: int
) -> None:
    problem = Problem(kv_lens, window, 3, torch.float32, "cpu").with_trees(offset)
    found = problem.reference().view(3, len(kv_lens), window, RANK)
    for request, (entries, paths) in enumerate(zip(problem.entries, problem.paths, strict=True)):
        first = len(entries) - offset - window
        for row, path in enumerate(paths):
            seen = entries[[*range(first), *(first + key for key in path)]]
            token = request * window + row
            query = torch.cat((problem.q_latent[:, token], problem.q[token, :, NOPE:]), -1)
            expected = (query @ seen.t() * SCALE).softmax(-1) @ seen[:, :RANK]
            torch.testing.assert_close(found[:, request, row], expected, rtol=1e-4, atol=1e-5)


@on_each_kernel_device
@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("num_processors", [1, 40])
@pytest.mark.parametrize(("kv_lens", "window", "offset"), TREES)
def test_rows_of_trees_equal_the_reference(
    kv_lens: list[int], window: int, offset: int, num_processors: int, device: str
) -> None:
    problem = Problem(kv_lens, window, 5, torch.float32, device).with_trees(offset)
    torch.testing.assert_close(
        problem.run(num_processors), problem.reference(), rtol=1e-5, atol=2e-5
    )


@on_each_kernel_device
@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("num_processors", [1, 40])
@pytest.mark.parametrize("heads", [5, 40])
def test_trees_of_different_numbers_of_nodes_have_the_results_of_whole_trees(
    heads: int, num_processors: int, device: str
) -> None:
    counts, window = (3, 8, 1), 8
    problem = Problem([70, 33, 129], window, heads, torch.float32, device).with_trees(0)
    expected, rows = problem.reference(), ragged_rows(counts, window, device)
    kept = rows.flat(torch.arange(3 * window, device=device).view(3, window))
    tables = problem.tables
    assert tables.tree is not None
    lens = tables.kv_lens - window + rows.counts
    problem.tables = replace(tables, rows=rows, kv_lens=lens, tree=tables.tree.of(rows))
    problem.q_latent, problem.q = problem.q_latent[:, kept].contiguous(), problem.q[kept]
    for found in (problem.run(num_processors), problem.reference()):
        torch.testing.assert_close(found, expected[:, kept], rtol=1e-5, atol=2e-5)


@only_outside_the_interpreter
@pytest.mark.parametrize("window", [1, 4])
def test_the_absorbed_form_equals_the_expanded_form(window: int) -> None:
    heads, kv_lens = 3, [30, 11]
    problem = Problem(kv_lens, window, heads, torch.float32, "cpu")
    up = torch.randn(heads, NOPE + VALUE, RANK) * RANK**-0.5
    keys, values = up.split((NOPE, VALUE), 1)
    problem.q_latent = problem.q[..., :NOPE].transpose(0, 1) @ keys
    absorbed = (problem.reference() @ values.mT).transpose(0, 1)
    for request, entries in enumerate(problem.entries):
        rows = slice(request * window, (request + 1) * window)
        part = ExpandedPart(
            rows, torch.arange(len(entries)), (window,), (len(entries),), True, None
        )
        own_keys, own_values = expand(entries, up, NOPE, part, None)
        scores = torch.einsum("whd,lhd->hwl", problem.q[rows], own_keys) * SCALE
        seen = torch.arange(len(entries)) <= torch.arange(-window, 0)[:, None] + len(entries)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hwl,lhv->whv", weights, own_values)
        torch.testing.assert_close(absorbed[rows], expected, rtol=1e-4, atol=1e-5)


@only_outside_the_interpreter
def test_joined_parts_equal_one_part() -> None:
    heads, own, before = 3, 6, 21
    layer = torch.randn(5, PAGE_SIZE, RANK + ROPE)
    slots = torch.randperm(5 * PAGE_SIZE)[: own + before]
    q = torch.randn(own + 2, heads, NOPE + ROPE)
    up = torch.randn(heads, NOPE + VALUE, RANK) * RANK**-0.5
    rows = slice(2, own + 2)

    def part(first: int, last: int, *, is_causal: bool) -> ExpandedPart:
        return ExpandedPart.of(
            rows, slots[first:last], (own,), (last - first,), is_causal=is_causal
        )

    def run(*parts: ExpandedPart) -> torch.Tensor:
        out = torch.zeros(own + 2, heads, VALUE)
        expanded_attention(q, layer, up, parts, SCALE, out)
        return out

    whole = run(part(0, own + before, is_causal=True))
    joined = run(
        part(0, 10, is_causal=False),
        part(10, before, is_causal=False),
        part(before, own + before, is_causal=True),
    )
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)
    assert not whole[:2].any() and whole[2:].abs().max() > 0.1


TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def operands(
    rows: int, heads: int, depth: int, width: int, *, by_depth: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x is a slice of wider heads, the weight a slice of a fused one, and the output transposed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, heads, depth + 8, generator=generator)[..., :depth]
    if by_depth:
        fused = torch.randn(heads, 8 + width, depth, generator=generator)
        weight = fused[:, 8:].mT
    else:
        weight = torch.randn(heads, depth + 8, width, generator=generator)[:, :depth]
    out = torch.full((heads, rows, width), torch.nan).transpose(0, 1)
    return x.to(device), weight.to(device), out.to(device)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("by_depth", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "depth", "width"),
    # The interpreter takes long for each block of the width.
    [
        (1, 2, 128, 512),
        (5, 3, 200, 24),
        (40, 1, 16, 40),
        (MAX_ROWS, 2, 300, 140 if INTERPRETED else 600),
    ],
)
def test_the_kernel_equals_the_reference(
    rows: int, heads: int, depth: int, width: int, by_depth: bool, dtype: torch.dtype, device: str
) -> None:
    x, weight, out = operands(rows, heads, depth, width, by_depth=by_depth, device=device)
    x, weight, out = x.to(dtype), weight.to(dtype) * depth**-0.5, out.to(dtype)
    expected = torch.empty_like(out)
    head_gemm(x, weight, out)
    head_gemm.reference(x, weight, expected)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


@only_outside_the_interpreter
def test_the_reference_multiplies_each_head_with_its_own_weight() -> None:
    x, weight, out = operands(3, 2, 5, 7, by_depth=True, device="cpu")
    head_gemm(x, weight, out)
    for head in range(2):
        torch.testing.assert_close(out[:, head], x[:, head] @ weight[head])
