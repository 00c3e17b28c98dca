"""Window attention of draft trees: each row equals plain attention over its own path. The reference
here, the Triton kernels under Triton's interpreter in a subprocess, all on a CUDA device
(`-m gpu`)."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.tree_problem import TreeProblem
from tests.kernels.window_problem import TOLERANCE, Case, Problem
from tllm_spec.kernels.attention.visible_keys import KeySpan, TreeMask
from tllm_spec.kernels.attention.window_attention_cuda import serves
from tllm_spec.kernels.dispatch import has_kernels

BF16 = torch.bfloat16
# A case, and the keys of the tree's region before the window.
CASES = {
    "a tree alone": (Case((5, 16, 40), 5, 2, 16, 16), 0),
    "a draft step of one beam": (Case((7, 33), 1, 3, 16, 16), 6),
    "beams over pages": (Case((12, 33, 150), 4, 2, 32, 4, num_programs=24, padding=(12, 10**9)), 8),
    "64 keys in a window": (Case((64, 70), 64, 2, 16, 16, kv_heads=1), 0),
    "64 keys, splits": (Case((64, 300), 3, 2, 16, 16, num_programs=32, spare_pages=3), 61),
    "two tiles of rows": (Case((40, 130), 24, 4, 16, 32, kv_heads=1, num_programs=8), 9),
    "bfloat16": (Case((33, 300), 8, 4, 64, 32, kv_heads=1, num_programs=12, dtype=BF16), 8),
    "sinks": (Case((33, 300), 8, 4, 64, 32, num_programs=12, has_sinks=True), 8),
    "a tree longer than the sliding window": (
        Case((12, 17, 29, 50), 12, 2, 16, 4, span=KeySpan(4, slides=True)),
        0,
    ),
    "beams that slide": (
        Case(
            (24, 33, 350),
            4,
            2,
            16,
            16,
            num_programs=24,
            padding=(20, 10**9),
            span=KeySpan(9, slides=True),
        ),
        14,
    ),
    "a tree over a border of chunks": (
        Case((12, 17, 29, 50), 12, 2, 16, 4, span=KeySpan(14, slides=False)),
        0,
    ),
    "beams over chunks": (
        Case(
            (24, 33, 350),
            4,
            2,
            16,
            16,
            num_programs=24,
            padding=(20, 10**9),
            span=KeySpan(5, slides=False),
        ),
        14,
    ),
    "64 keys, chunks": (
        Case((64, 300), 3, 2, 16, 16, num_programs=32, span=KeySpan(290, slides=False)),
        61,
    ),
}


# For the CUDA kernel, which has windows of up to 16 tokens and 32 rows.
CUDA_CASES = {
    "a tree of eight": (Case((8, 17, 300), 8, 4, 128, 32, spare_pages=2, dtype=BF16), 0),
    "beams": (Case((12, 27, 64, 600), 4, 4, 128, 64, padding=(12, 10**9), dtype=BF16), 8),
    "64 keys": (Case((64, 65, 290), 8, 4, 128, 16, dtype=BF16), 56),
    "sixteen tokens": (Case((16, 31, 400), 16, 2, 64, 16, dtype=torch.float16), 0),
    "sinks": (Case((12, 27, 64, 600), 4, 8, 64, 64, padding=(12,), dtype=BF16, has_sinks=True), 8),
    "long requests": (Case((5000, 40, 9000), 4, 4, 128, 64, kv_heads=1, dtype=BF16), 33),
}


@pytest.mark.parametrize("name", CASES)
def test_each_row_of_the_reference_attends_to_its_own_path(name: str) -> None:
    problem = TreeProblem(*CASES[name])
    problem.check(problem.attend_plainly())


@on_each_kernel_device
@pytest.mark.parametrize("name", CASES)
def test_each_row_attends_to_its_own_path_and_its_kv_is_written(name: str, device: str) -> None:
    assert has_kernels(torch.device(device))
    problem, reference = TreeProblem(*CASES[name], device), TreeProblem(*CASES[name], device)
    problem.check(problem.attend())
    reference.attend_plainly()
    pool, written = reference.layer[:, 1:], problem.layer[:, 1:]  # page 0 is padding's
    tolerance = TOLERANCE[problem.case.dtype]
    torch.testing.assert_close(written, pool, rtol=tolerance, atol=tolerance, equal_nan=True)


# A case, and how many nodes each request's tree has.
RAGGED = {
    "trees": (Case((8, 16, 40, 64), 8, 2, 16, 16), (3, 8, 1, 5)),
    "splits": (Case((64, 300, 130), 12, 2, 16, 16, num_programs=32), (1, 12, 7)),
    "two tiles of rows": (Case((40, 130), 24, 4, 16, 32, kv_heads=1, num_programs=8), (20, 2)),
    "bfloat16 and sinks": (Case((33, 300), 8, 4, 64, 32, dtype=BF16, has_sinks=True), (2, 6)),
    "sliding": (Case((12, 50), 12, 2, 16, 4, span=KeySpan(4, slides=True)), (11, 5)),
}
CUDA_RAGGED = {
    "eight nodes": (Case((8, 17, 300), 8, 4, 128, 32, spare_pages=2, dtype=BF16), (8, 1, 5)),
    "sixteen nodes": (Case((16, 31, 4000), 16, 2, 64, 16, dtype=torch.float16), (3, 16, 9)),
}


def check_first(problem: TreeProblem, counts: tuple[int, ...]) -> None:
    """Each row has the result that it has in a whole tree, whose other nodes it does not see."""
    full, tolerance = problem.expected(), TOLERANCE[problem.case.dtype]
    expected = torch.cat([own[:count] for own, count in zip(full, counts, strict=True)])
    problem.keep_first(counts)
    for attend in (problem.attend, problem.attend_plainly):
        found = attend()[0].cpu().double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@on_each_kernel_device
@pytest.mark.parametrize("name", RAGGED)
def test_trees_of_different_numbers_of_nodes_share_the_rows(name: str, device: str) -> None:
    case, counts = RAGGED[name]
    check_first(TreeProblem(case, 0, device), counts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_RAGGED)
def test_such_trees_run_the_cuda_kernel(name: str) -> None:
    case, counts = CUDA_RAGGED[name]
    problem = TreeProblem(case, 0, "cuda")
    assert serves(problem.qkv, problem.cos_sin, None, problem.layer)
    check_first(problem, counts)


@on_each_kernel_device
@pytest.mark.parametrize("num_programs", [1, 24])
def test_a_chain_as_a_tree_equals_the_chain(num_programs: int, device: str) -> None:
    case = Case((8, 9, 200), 6, 3, 16, 16, num_programs=num_programs)
    problem = Problem(case, device)
    expected = problem.attend()
    bits = [(1 << row + 1) - 1 for row in range(case.window)]
    tree = TreeMask(torch.tensor([bits] * 3, device=device), case.window)
    problem.tables = replace(problem.tables, tree=tree)
    assert torch.equal(problem.attend(), expected)


def test_a_mask_has_one_bit_for_each_key_and_at_most_64() -> None:
    kv_lens, keys = torch.tensor([70, 64]), torch.arange(72)
    bits = torch.tensor([[1 << 62, -(1 << 63)]] * 2)
    visible = TreeMask(bits, 64).visible(kv_lens, keys)
    assert visible[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 68]
    assert visible[0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 69]
    assert visible[1].nonzero().tolist() == [[0, 62], [1, 63]]
    for length in (1, 65):
        with pytest.raises(AssertionError):
            TreeMask(bits, length)


@pytest.mark.gpu
@pytest.mark.parametrize("num_processors", [132, 30, 14, 1])  # as in test_window_attention_cuda.py
@pytest.mark.parametrize("name", CUDA_CASES)
def test_the_cuda_kernel_gives_each_row_its_own_path(name: str, num_processors: int) -> None:
    problem = TreeProblem(*CUDA_CASES[name], "cuda")
    assert serves(problem.qkv, problem.cos_sin, None, problem.layer)
    problem.check(problem.attend(replace(problem.workspace(), num_processors=num_processors)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES | CUDA_CASES)
def test_a_captured_launch_can_be_replayed_with_other_lengths_and_trees(name: str) -> None:
    case, offset = (CASES | CUDA_CASES)[name]
    captured = TreeProblem(case, offset, "cuda")
    workspace = captured.workspace()
    graph, output = captured_graph(lambda: captured.attend(workspace))
    kv_lens = case.kv_lens[1:] + case.kv_lens[:1]
    other = TreeProblem(replace(case, kv_lens=kv_lens), offset, "cuda", seed=1)
    copy_all(captured.inputs(), other.inputs())
    graph.replay()
    other.check(output)
