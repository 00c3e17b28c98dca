"""Beams of draft trees, and the K best tokens of a row."""

from itertools import pairwise

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tests.kernels.tree_growth import Candidates, Draft, Path, grow_tree, random_draft, slow_tree
from tllm_spec.kernels.drafts.draft_beams import BeamPool, first_beams, grow, select
from tllm_spec.kernels.drafts.top_tokens import top_tokens
from tllm_spec.kernels.sampling.choose_token import choose_draft
from tllm_spec.kernels.slots.accept import DraftTree

TABLES = ("tokens", "parents", "depths", "bits")  # of a `DraftTree`
SIZES = [
    (1, 1, 1),  # a chain
    (1, 4, 4),
    (2, 1, 2),
    (2, 3, 5),
    (2, 6, 22),
    (4, 4, 7),
    (4, 5, 63),
    (8, 2, 63),
    (8, 6, 31),
    (8, 6, 63),
]


def check_the_tree(tree: DraftTree, draft: Draft, size: tuple[int, int, int], row: int) -> None:
    topk, num_steps, num_drafts = size
    expected = slow_tree(draft, topk, num_steps, num_drafts)
    numbers = {each: node for node, each in enumerate(expected, 1)}
    tokens, parents, depths, bits = (getattr(tree, name)[row].tolist() for name in TABLES)
    assert tokens == [each.path[-1] for each in expected]
    assert tree.scores is not None
    scores = tree.scores[row].nan_to_num(nan=-1.0).tolist()
    assert scores == [-1.0 if each.score != each.score else each.score for each in expected]
    assert parents == [-1, *(numbers[e.parent] if e.parent else 0 for e in expected)]
    assert depths == [0, *(len(each.path) for each in expected)]
    for node, value in enumerate(bits):
        path = [0] if node == 0 else [*path_of(parents, node)]
        assert [other for other in range(64) if value >> other & 1] == path


def path_of(parents: list[int], node: int) -> list[int]:
    return [*path_of(parents, parents[node]), node] if node else [0]


@pytest.mark.covering
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tree_is_that_of_the_slow_reference(size: tuple[int, int, int], tied: bool) -> None:
    topk, num_steps, num_drafts = size
    for seed in range(0, 6, 3):
        drafts = [random_draft(seed + request, topk, tied=tied) for request in range(3)]
        tree = grow_tree(drafts, topk, num_steps, num_drafts)
        for row, draft in enumerate(drafts):
            check_the_tree(tree, draft, size, row)


def worked_example(path: Path) -> Candidates:
    """K = 2, S = 3, 5 drafts."""
    return {
        (): [(0.6, 10), (0.3, 11)],
        (10,): [(0.5, 20), (0.35, 21)],
        (11,): [(0.9, 22), (0.05, 23)],
        (10, 20): [(0.8, 30), (0.1, 31)],
        (11, 22): [(0.7, 32), (0.2, 33)],
    }[path]


def test_the_worked_example() -> None:
    tree = grow_tree([worked_example], 2, 3, 5)
    assert tree.tokens.tolist() == [[10, 11, 20, 22, 30]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    rows = ["".join(str(b >> column & 1) for column in range(6)) for b in tree.bits[0].tolist()]
    assert rows == ["100000", "110000", "101000", "110100", "101010", "110101"]


@pytest.mark.parametrize(
    ("selected", "beams", "first_child", "next_sibling", "depths"),
    [
        (
            [0, 1, 4, 8, 20, 24, 36],
            {4: 4, 5: 8, 8: 20},
            [1, 3, 4, 5, 6, 7, -1, -1],
            [-1, 2, -1, -1, -1, -1, -1, -1],
            [0, 1, 1, 2, 2, 3, 3, 4],
        ),
        (
            [0, 4, 5, 6, 7, 24, 36],
            {4: 4, 5: 5, 8: 24},
            [1, 2, -1, 6, -1, -1, 7, -1],
            [-1, -1, 3, 4, 5, -1, -1, -1],
            [0, 1, 2, 2, 2, 2, 3, 4],
        ),
    ],
)
def test_the_links_are_those_of_sglangs_check(
    selected: list[int],
    beams: dict[int, int],
    first_child: list[int],
    next_sibling: list[int],
    depths: list[int],
) -> None:
    pool = BeamPool.allocate(1, 4, 4, torch.device("cpu"))
    pool.scores.zero_()[0, selected] = 0.5
    pool.tokens.copy_(torch.arange(52))
    pool.beams.zero_()[0, :4] = torch.arange(4)
    for index, candidate in beams.items():
        pool.beams[0, index] = candidate
    tree = select(pool, 7)
    parents = tree.parents[0].tolist()
    assert tree.tokens.tolist() == [selected] and tree.depths.tolist() == [depths]
    children = [[n for n, parent in enumerate(parents) if parent == node] for node in range(8)]
    assert [own[0] if own else -1 for own in children] == first_child
    following = {a: b for own in children for a, b in pairwise(own)}
    assert [following.get(node, -1) for node in range(8)] == next_sibling


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nan_scores_give_a_valid_tree_and_leave_other_requests_alone(depth: int) -> None:
    size = (4, 4, 31)
    drafts = [
        random_draft(1, 4, tied=False),
        random_draft(2, 4, tied=False, nan_depth=depth),
        random_draft(3, 4, tied=False),
    ]
    tree = grow_tree(drafts, *size)
    for row, draft in enumerate(drafts):
        check_the_tree(tree, draft, size, row)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents[1].tolist()[1:], 1))


@on_each_kernel_device
@pytest.mark.parametrize(
    "size", [(2, 3, 5), (3, 3, 11), (4, 4, 31), (8, 2, 63), (1, 3, 3), (8, 1, 8)]
)
def test_the_kernels_grow_the_slow_references_tree(device: str, size: tuple[int, int, int]) -> None:
    drafts = [
        random_draft(1, size[0], tied=True),
        random_draft(2, size[0], tied=False),
        random_draft(3, size[0], tied=True, nan_depth=1),
        random_draft(4, size[0], tied=False, nan_depth=0),
    ]
    tree = grow_tree(drafts, *size, device=device)
    for row, draft in enumerate(drafts):
        check_the_tree(tree, draft, size, row)


@on_each_kernel_device
@pytest.mark.skipif(INTERPRETED, reason="too slow there")
@pytest.mark.parametrize("size", [*SIZES, (16, 4, 63)])
def test_the_kernels_grow_trees_of_real_sizes(device: str, size: tuple[int, int, int]) -> None:
    drafts = [random_draft(seed, size[0], tied=seed % 2 == 0) for seed in range(32)]
    tree = grow_tree(drafts, *size, device=device)
    for row, draft in enumerate(drafts):
        check_the_tree(tree, draft, size, row)


def chained_tree(inputs: torch.Tensor, probs: torch.Tensor, tokens: torch.Tensor) -> DraftTree:
    """Four steps by a draft model that is a table: the next tokens after each token."""
    pool = BeamPool.allocate(len(inputs), 4, 4, inputs.device)
    beams = first_beams(pool, probs[inputs], tokens[inputs])
    for step in (1, 2, 3):
        beams = grow(pool, step, beams, probs[beams.tokens], tokens[beams.tokens])
    return select(pool, 15)


@pytest.mark.gpu
def test_a_tree_grows_in_a_cuda_graph_without_synchronisation() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, 4, generator=generator).sort(dim=1, descending=True).values
    tokens = torch.randint(0, 50, (50, 4), generator=generator)
    table = probs.cuda(), tokens.cuda()
    inputs = torch.arange(3, device="cuda")
    graph, found = captured_graph(lambda: chained_tree(inputs, *table))
    for first in (7, 30):
        inputs.copy_(torch.arange(first, first + 3))
        graph.replay()
        expected = chained_tree(torch.arange(first, first + 3), probs, tokens)
        for name in TABLES:
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))


NAN, INF = float("nan"), float("inf")


def test_equal_values_are_ordered_by_column() -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 3.0, 0.0]])
    assert top_tokens.reference(logits, 6)[1].tolist() == [[1, 3, 4, 0, 2, 5]]


def test_probabilities_are_a_softmax_of_all_columns() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    probs, tokens = top_tokens.reference(logits, 4)
    expected, columns = logits.softmax(1).sort(dim=1, descending=True)
    assert torch.equal(probs, expected[:, :4]) and torch.equal(tokens, columns[:, :4])


def test_rows_that_are_no_numbers_have_valid_tokens_and_nan_probabilities() -> None:
    logits = torch.tensor([[NAN, 1.0, 2.0, NAN], [-INF] * 4, [0.0, INF, 1.0, 2.0], [NAN] * 4])
    probs, tokens = top_tokens.reference(logits, 4)
    assert tokens.tolist() == [[2, 1, 0, 3], [0, 1, 2, 3], [1, 3, 2, 0], [0, 1, 2, 3]]
    assert probs.isnan().all()


@pytest.mark.parametrize("mapped", [False, True])
def test_the_first_coupled_candidate_is_the_chains_draft(mapped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 200, generator=generator) * 2
    token_map = torch.randperm(900, generator=generator)[:200] if mapped else None
    temperature = torch.tensor([0.8, 0.0, 1.3])
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([10, 11, 12])
    probs, tokens = top_tokens.reference(logits, 4, token_map, temperature, seeds, positions)
    per_row = (column.repeat_interleave(4) for column in (temperature, seeds, positions))
    assert torch.equal(tokens[:, 0], choose_draft.reference(logits, token_map, *per_row))
    assert (probs[:, :-1] >= probs[:, 1:]).all() and (probs > 0).all()
    greedy = top_tokens.reference(logits[4:8], 4, token_map)
    assert torch.equal(tokens[4:8], greedy[1]) and torch.equal(probs[4:8], greedy[0])
    # Requests with other noise have other candidates.
    assert not torch.equal(tokens, top_tokens.reference(logits, 4, token_map)[1])


def check(device: str, logits: torch.Tensor, topk: int, *arguments: torch.Tensor | None) -> None:
    expected = top_tokens.reference(logits, topk, *arguments)
    there = (None if each is None else each.to(device) for each in arguments)
    probs, tokens = top_tokens(logits.to(device), topk, *there)
    assert tokens.tolist() == expected[1].tolist()
    torch.testing.assert_close(probs.cpu(), expected[0], rtol=4e-5, atol=1e-7, equal_nan=True)


def sizes() -> list[tuple[int, int, int]]:
    small = [(1, 5, 5), (3, 1000, 1), (2, 1024, 8), (3, 2500, 16), (1, 20_000, 4)]
    return small if INTERPRETED else [*small, (64, 128_256, 8), (7, 151_936, 16)]


@on_each_kernel_device
@pytest.mark.parametrize("size", sizes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_find_the_references_tokens(
    device: str, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, vocab_size, topk = size
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator).mul_(3).to(dtype)
    check(device, logits, topk)
    check(device, logits.round(), topk)  # many ties


@on_each_kernel_device
def test_the_kernels_treat_values_that_are_no_numbers_like_the_reference(device: str) -> None:
    logits = torch.randn(8, 2100, generator=torch.Generator().manual_seed(3))
    logits[0, 5] = NAN
    logits[1, 2000] = INF
    logits[2] = -INF
    logits[3] = NAN
    logits[4, 3:] = -INF
    logits[5, :2090] = -INF
    logits[6, ::2] = -0.0
    logits[6, 1::2] = 0.0
    check(device, logits, 5)


@on_each_kernel_device
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_the_kernels_draw_the_references_coupled_candidates(
    device: str, mapped: bool, cut: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 1500, generator=generator) * 3
    token_map = torch.randperm(4000, generator=generator)[:1500] if mapped else None
    temperature = torch.tensor([0.7, 0.0, 1.0])
    seeds, positions = torch.tensor([5, 6, -7]), torch.tensor([10, 11, 2**31])
    cuts = torch.tensor([1.0, 9.0, 1.0, 1.0, 2.0, 100.0]) if cut else None
    check(device, logits, 8, token_map, temperature, seeds, positions, cuts)
