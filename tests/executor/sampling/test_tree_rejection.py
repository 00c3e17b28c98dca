"""Rejection sampling on a tree: its distribution, its thresholds, and greedy as the limit."""

import pytest
import torch

from tests.kernels.tree_layouts import layout_of
from tllm_spec.executor.sampling.acceptance_rules import reject_chain, reject_tree
from tllm_spec.kernels.drafts.draft_layout import DraftLayout
from tllm_spec.kernels.slots.accept import Accepted, accept_path

DRAWS = 20_000
P = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05])
# Two children of the root, one of which has two children.
LAYOUT = layout_of([-1, 0, 0, 1, 1])
TOKENS = torch.tensor([0, 1, 3, 0, 2])


def emitted(
    probs: torch.Tensor,
    tokens: torch.Tensor = TOKENS,
    layout: DraftLayout = LAYOUT,
    **options: float,
) -> Accepted:
    """Rejection for DRAWS requests with the distributions `[W, V]`."""
    return reject_tree(
        probs.expand(DRAWS, *probs.shape),
        tokens.expand(DRAWS, -1),
        torch.tensor(layout.parents).expand(DRAWS, -1),
        layout.max_depth,
        None,
        torch.arange(DRAWS),
        torch.full((DRAWS,), 7),
        **options,
    )


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=len(P)) / len(tokens)


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_the_emitted_tokens_have_the_targets_distribution_at_every_depth() -> None:
    after_1 = torch.tensor([0.1, 0.3, 0.2, 0.3, 0.1])
    after_0 = torch.tensor([0.2, 0.2, 0.4, 0.1, 0.1])
    others = torch.full((5,), 0.2)
    probs = torch.stack((P, after_1, others, after_0, others))
    tokens, lens, rows = emitted(probs)
    # 0.1% of chi-square with 4 degrees of freedom are above 18.47.
    assert chi_square(tokens[:, 0], P) < 18.47
    has_second = (tokens[:, 0] == 1) & (lens > 1)
    assert torch.equal(has_second, tokens[:, 0] == 1)  # token 1 is only emitted by acceptance
    assert chi_square(tokens[has_second, 1], after_1) < 18.47
    third = tokens[(rows[:, 2] == 3) & (lens == 3), 2]
    assert len(third) > 300 and chi_square(third, after_0) < 18.47
    assert (rows[:, 1][tokens[:, 0] == 3] == 2).all()


def test_a_chain_is_rejected_like_reject_chain() -> None:
    chain, number = DraftLayout.chain(2), torch.arange(DRAWS) % 3
    generator = torch.Generator().manual_seed(2)
    probs = torch.rand(DRAWS, 3, 5, generator=generator).softmax(-1)
    tokens = torch.randint(0, 5, (DRAWS, 3), generator=generator)
    parents, seeds = torch.tensor(chain.parents).expand(DRAWS, -1), torch.arange(DRAWS)
    first = torch.full((DRAWS,), 7)
    found, lens, _ = reject_tree(probs, tokens, parents, 2, number, seeds, first)
    positions = first.unsqueeze(1) + torch.arange(3)
    expected, numbers, _ = reject_chain(probs, None, tokens[:, 1:], number, seeds, positions)
    assert torch.equal(lens, numbers) and set(lens.tolist()) == {1, 2, 3}
    is_new = torch.arange(3) < lens.unsqueeze(1)
    assert torch.equal(found[is_new], expected[is_new])


def test_a_second_sibling_with_the_same_token_changes_nothing() -> None:
    layout, tokens = layout_of([-1, 0, 0, 0]), torch.tensor([0, 1, 1, 3])
    probs = P.expand(4, 5)
    found, _, rows = emitted(probs, tokens, layout)
    assert chi_square(found[:, 0], P) < 18.47 and not (rows == 2).any()


def test_thresholds_below_one_accept_more_and_are_lossy() -> None:
    layout, tokens = layout_of([-1, 0, 0]), torch.tensor([0, 1, 3])
    probs = P.expand(3, 5)
    first = emitted(probs, tokens, layout, threshold_acc=0.5).tokens[:, 0]
    expected = torch.tensor([0.207, 0.501, 0.069, 0.200, 0.023])
    assert (frequencies(first) - expected).abs().max() < 0.015
    always = emitted(probs, tokens, layout, threshold_single=0.2).tokens[:, 0]
    assert (always == 1).all()


@pytest.mark.parametrize("valid", [0, 2, 99])
def test_certain_distributions_give_the_greedy_path(valid: int) -> None:
    generator = torch.Generator().manual_seed(valid)
    layout = layout_of([-1, 0, 0, 1, 1, 2, 3, 5])
    parents = torch.tensor(layout.parents).expand(64, -1)
    tokens = torch.randint(0, 3, (64, 8), generator=generator)
    targets = torch.randint(0, 3, (64, 8), generator=generator)
    probs, number = torch.nn.functional.one_hot(targets, 5).float(), torch.full((64,), valid)
    seeds = torch.arange(64)
    found = reject_tree(probs, tokens, parents, layout.max_depth, number, seeds, seeds)
    expected = accept_path(targets, tokens, parents, layout.max_depth, number)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert valid == 0 or len(set(expected.lens.tolist())) > 1


def test_nan_probabilities_end_the_path_with_no_token_and_spare_other_requests() -> None:
    probs = P.expand(2, 5, 5).clone()
    probs[0, 0] = float("nan")
    parents = torch.tensor(LAYOUT.parents).expand(2, -1)
    arguments = (TOKENS.expand(2, -1), parents, 2, None, torch.tensor([3, 3]), torch.tensor([8, 8]))
    tokens, lens, rows = reject_tree(probs, *arguments)
    assert lens[0] == 1 and tokens[0].tolist() == [-1] * 3 and rows[0].tolist() == [0] * 3
    clean = reject_tree(P.expand(2, 5, 5), *arguments)
    assert tokens[1].tolist() == clean.tokens[1].tolist()


def test_a_distribution_that_its_children_use_up_still_gives_a_token() -> None:
    layout = layout_of([-1, 0, 0])
    probs = torch.zeros(3, 5)
    probs[0, 1], probs[0, 3] = 0.5, 0.49  # a sum below 1: a coin may be above both
    probs[1:] = P
    tokens, lens, _ = emitted(probs, torch.tensor([0, 1, 3]), layout)
    assert (lens == 1).any() and (tokens >= 0).all()


@pytest.mark.gpu
def test_a_cuda_graph_rejects_like_the_cpu() -> None:
    probs = torch.rand(16, 5, 40, generator=torch.Generator().manual_seed(1)).softmax(-1)
    parents, seeds = torch.tensor(LAYOUT.parents).expand(16, -1), torch.arange(16)
    arguments = (TOKENS.expand(16, -1), parents, 2, None, seeds, seeds)
    there = [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]
    on_device = probs.cuda()
    reject_tree(on_device, *there)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = reject_tree(on_device, *there)
    on_device.copy_(probs.flip(0))
    graph.replay()
    expected = reject_tree(probs.flip(0), *arguments)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
