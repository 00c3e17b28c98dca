"""Rejection sampling on a tree: its distribution, its thresholds, and greedy as the limit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, draft_target, output_of
from tests.executor.sampling.chi_square import p_value
from tests.kernels.tree_layouts import chain_layout, layout_of
from tllm_spec.executor.sampling.acceptance_rules import (
    reject_chain,
    reject_tree,
    synthetic_acceptance,
)
from tllm_spec.kernels.drafts.draft_layout import HostTree
from tllm_spec.kernels.sampling.gumbel import DRAFT_DOMAIN, gumbel_noise
from tllm_spec.kernels.slots.accept import Accepted, SlotTables, accept_path
from tllm_spec.kernels.slots.slot_windows import accept_windows

VOCAB, NUM = 12, 60_000


def distributions(*shape: int, seed: int) -> torch.Tensor:
    return (
        2 * torch.randn((*shape, VOCAB), generator=torch.Generator().manual_seed(seed))
    ).softmax(-1)


def run(
    target: torch.Tensor,
    draft: torch.Tensor | None,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """target `[K+1, V]`, draft `[K, V]`: the same for all NUM requests, whose seeds are 0, 1, 2,
    ..."""
    length = drafts.shape[1]
    found = reject_chain(
        target.expand(NUM, -1, -1),
        None if draft is None else draft.expand(NUM, -1, -1),
        drafts,
        num_drafts,
        torch.arange(NUM),
        torch.arange(5, 6 + length).expand(NUM, -1),
    )
    return found.tokens, found.lens


def drawn(draft: torch.Tensor) -> torch.Tensor:
    """Drafts `[NUM, K]` from distributions `[K, V]`, as the draft model draws them."""
    columns = [
        (
            row.log()
            + gumbel_noise(torch.arange(NUM), torch.full((NUM,), 5 + position), VOCAB, DRAFT_DOMAIN)
        ).argmax(-1)
        for position, row in enumerate(draft)
    ]
    return torch.stack(columns, dim=1)


def assert_drawn_from(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    assert p_value(torch.bincount(tokens, minlength=VOCAB), probs * len(tokens)) > 1e-4


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_emitted_position_has_the_targets_distribution(length: int) -> None:
    target, draft = distributions(length + 1, seed=1), distributions(length, seed=2)
    tokens, lens = run(target, draft, drawn(draft))
    assert set(lens.tolist()) == set(range(1, length + 2))
    for position in range(length + 1):
        assert_drawn_from(tokens[lens > position][:, position], target[position])


def test_the_rate_of_acceptance_is_the_overlap_of_the_distributions() -> None:
    target, draft = distributions(2, seed=1), distributions(1, seed=2)
    _, lens = run(target, draft, drawn(draft))
    overlap = torch.minimum(target[0], draft[0]).sum()
    assert abs((lens == 2).double().mean() - overlap) < 0.01


def test_drafts_that_were_certain_leave_the_distribution_alone_too() -> None:
    target = distributions(3, seed=3)
    drafts = torch.tensor([[int(target[0].argmax()), 4]]).expand(NUM, -1)
    tokens, lens = run(target, None, drafts)
    assert_drawn_from(tokens[:, 0], target[0])
    assert_drawn_from(tokens[lens > 1][:, 1], target[1])
    assert abs((lens > 1).double().mean() - target[0].max()) < 0.01


def test_padding_is_never_accepted_and_its_position_is_drawn_from_the_target() -> None:
    target, draft = distributions(3, seed=4), distributions(2, seed=4)[:2]
    num_drafts = torch.arange(NUM) % 3
    tokens, lens = run(target, draft, drawn(draft), num_drafts)
    assert (lens <= num_drafts + 1).all()
    for number in range(3):
        mine = num_drafts == number
        assert_drawn_from(tokens[mine & (lens > number)][:, number], target[number])


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    draft = distributions(3, seed=5)
    target = torch.cat((draft, distributions(1, seed=6)))
    drafts = drawn(draft)
    tokens, lens = run(target, draft, drafts)
    assert (lens == 4).all() and torch.equal(tokens[:, :3], drafts)


def test_without_drafts_the_token_is_drawn_from_the_target() -> None:
    target = distributions(1, seed=7)
    tokens, lens = run(target, None, torch.empty((NUM, 0), dtype=torch.int64))
    assert (lens == 1).all()
    assert_drawn_from(tokens[:, 0], target[0])


def test_probabilities_that_are_not_numbers_give_no_token() -> None:
    target, draft = distributions(2, seed=8), distributions(1, seed=9)
    target[0] = torch.nan
    tokens, lens = run(target, draft, drawn(draft))
    assert (lens == 1).all() and (tokens[:, 0] == -1).all()


def test_the_test_of_distributions_itself_can_fail() -> None:
    """Keeping rejected positions at the target's distribution instead of the residual is the
    classical mistake."""
    target, draft = distributions(2, seed=1), distributions(1, seed=2)
    drafts = drawn(draft)
    tokens, lens = run(target, draft, drafts)
    redrawn = torch.multinomial(
        target[0], NUM, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    wrong = torch.where(lens == 2, tokens[:, 0], redrawn)
    assert p_value(torch.bincount(wrong, minlength=VOCAB), target[0] * NUM) < 1e-9


DRAWS = 20_000
P = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05])
# Two children of the root, one of which has two children.
LAYOUT = layout_of([-1, 0, 0, 1, 1])
TOKENS = torch.tensor([0, 1, 3, 0, 2])


def emitted(
    probs: torch.Tensor,
    tokens: torch.Tensor = TOKENS,
    layout: HostTree = LAYOUT,
    **options: float,
) -> Accepted:
    """Rejection for DRAWS requests with the distributions `[W, V]`."""
    return reject_tree(
        probs.expand(DRAWS, *probs.shape),
        tokens.expand(DRAWS, -1),
        torch.tensor(layout.parents).expand(DRAWS, -1),
        torch.tensor(layout.depths).expand(DRAWS, -1),
        layout.depth,
        torch.arange(DRAWS),
        torch.full((DRAWS,), 7),
        **options,
    )


def without_padding(layout: HostTree, number: torch.Tensor) -> torch.Tensor:
    """The parents of so many drafts `[B]`, as slots have them, `[B, W]`."""
    parents = torch.tensor(layout.parents).expand(len(number), -1)
    return parents.masked_fill(torch.arange(len(layout.parents)) > number.unsqueeze(1), -1)


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
    chain, number = chain_layout(2), torch.arange(DRAWS) % 3
    generator = torch.Generator().manual_seed(2)
    probs = torch.rand(DRAWS, 3, 5, generator=generator).softmax(-1)
    tokens = torch.randint(0, 5, (DRAWS, 3), generator=generator)
    parents, seeds = without_padding(chain, number), torch.arange(DRAWS)
    first, depths = torch.full((DRAWS,), 7), torch.tensor(chain.depths).expand(DRAWS, -1)
    found, lens, _ = reject_tree(probs, tokens, parents, depths, 2, seeds, first)
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
    tokens = torch.randint(0, 3, (64, 8), generator=generator)
    targets = torch.randint(0, 3, (64, 8), generator=generator)
    probs, number = torch.nn.functional.one_hot(targets, 5).float(), torch.full((64,), valid)
    seeds, parents = torch.arange(64), without_padding(layout, number)
    depths = torch.tensor(layout.depths).expand(64, -1)
    found = reject_tree(probs, tokens, parents, depths, layout.depth, seeds, seeds)
    parents = torch.tensor(layout.parents).expand(64, -1)
    expected = accept_path(targets, tokens, parents, layout.depth, number)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert valid == 0 or len(set(expected.lens.tolist())) > 1


def test_nan_probabilities_end_the_path_with_no_token_and_spare_other_requests() -> None:
    probs = P.expand(2, 5, 5).clone()
    probs[0, 0] = float("nan")
    rows = (torch.tensor(each).expand(2, -1) for each in (LAYOUT.parents, LAYOUT.depths))
    arguments = (TOKENS.expand(2, -1), *rows, 2, torch.tensor([3, 3]), torch.tensor([8, 8]))
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
    rows = (torch.tensor(each).expand(16, -1) for each in (LAYOUT.parents, LAYOUT.depths))
    seeds = torch.arange(16)
    arguments = (TOKENS.expand(16, -1), *rows, 2, seeds, seeds)
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


# Synthetic acceptance: by how much the coins follow the rates, and what is emitted.


NUM_ROWS = 20_000
RATES = (0.8, 0.5, 0.5, 0.1, 0.0)
TARGETS, DRAFTS = 100, 200  # tokens at position i are these plus i


def accept(
    rates: tuple[float, ...], num_drafts: torch.Tensor | None, seed: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many rounds of one request: every slot is one of them, and begins at another position."""
    length = len(rates) if num_drafts is not None else 0
    slots = torch.arange(NUM_ROWS)
    targets = (TARGETS + torch.arange(length + 1)).repeat(NUM_ROWS, 1)
    window = torch.zeros((NUM_ROWS, length + 1), dtype=torch.int64)
    window[:, 1:] = DRAFTS + torch.arange(length)
    counts = torch.zeros_like(slots) if num_drafts is None else num_drafts.clone()
    tables = SlotTables(slots.clone(), window, counts, torch.zeros_like(slots))
    synthetic = synthetic_acceptance(rates, torch.full((NUM_ROWS,), seed))
    found = accept_windows.reference(tables, slots, slots - 1, targets, None, synthetic)
    return found.tokens, found.lens


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """Within three standard deviations of a binomial distribution."""
    assert abs(num_hits - rate * num_trials) <= 3 * (num_trials * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("seed", [1, 7, 2**63 - 1])
def test_over_many_rounds_draft_i_is_accepted_as_often_as_rate_i_says(seed: int) -> None:
    _, lens = accept(RATES, torch.full((NUM_ROWS,), 5), seed)
    for index, rate in enumerate(RATES):
        assert_rate(int((lens > index + 1).sum()), NUM_ROWS, rate)


def test_a_round_emits_the_accepted_drafts_and_then_the_targets_token() -> None:
    tokens, lens = accept(RATES, torch.full((NUM_ROWS,), 5))
    assert set(lens.tolist()) == {1, 2, 4, 5}  # equal rates stand or fall together
    for length in (1, 2, 4, 5):
        rows = tokens[lens == length][:, :length]
        run = [*range(DRAFTS, DRAFTS + length - 1), TARGETS + length - 1]
        assert (rows == torch.tensor(run)).all()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_rates_leave_nothing_to_chance(rate: float) -> None:
    _, lens = accept((rate,) * 3, torch.full((NUM_ROWS,), 3))
    assert (lens == 1 + 3 * rate).all()


def test_no_more_drafts_are_accepted_than_were_proposed() -> None:
    num_drafts = torch.arange(NUM_ROWS) % 4
    tokens, lens = accept((0.9, 0.9, 0.9), num_drafts)
    assert (lens <= num_drafts + 1).all() and (lens[num_drafts == 0] == 1).all()
    assert_rate(int((lens[num_drafts == 2] == 3).sum()), NUM_ROWS // 4, 0.9)
    last = tokens.gather(1, (lens - 1).unsqueeze(1)).squeeze(1)
    assert torch.equal(last, TARGETS + lens - 1)


def test_a_round_without_drafts_emits_the_targets_token() -> None:
    tokens, lens = accept((0.9,), None)
    assert tokens.shape == (NUM_ROWS, 1) and (tokens == TARGETS).all() and (lens == 1).all()


def test_a_seed_gives_the_same_numbers_again_and_another_one_others() -> None:
    num_drafts = torch.full((NUM_ROWS,), 5)
    first, again, other = (accept(RATES, num_drafts, seed)[1] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    # Two independent draws of the numbers 0, 1, 3 and 4 with these rates agree in so many rows.
    assert_rate(int((first == other).sum()), NUM_ROWS, 0.2**2 + 0.3**2 + 0.4**2 + 0.1**2)


@pytest.mark.thinned
@pytest.mark.parametrize("options", [{}, {"draft_target_one_model": True}])
def test_requests_are_accepted_at_the_rates_whatever_the_models_say(
    tiny: Path, tiny_draft: Path, options: dict[str, Any]
) -> None:
    rates = (0.7, 0.4, 0.1)
    speculation = draft_target(tiny_draft, 3, synthetic_acceptance_rates=rates, **options)
    outputs = []
    for _ in range(2):
        harness = Harness(tiny, **speculation)
        requests = [
            harness.submit([i, 5], 150, temperature=t, seed=i)
            for i, t in enumerate((None, 0.8) * 4)
        ]
        harness.run()
        outputs.append(list(map(output_of, requests)))
    assert outputs[0] == outputs[1] and all(len(output) == 150 for output in outputs[0])
    stats = [request.counters.stats() for request in requests]
    drafted, accepted = (
        [sum(counts) for counts in zip(*(getattr(each, name) for each in stats), strict=True)]
        for name in ("per_position_drafted", "per_position_accepted")
    )
    for index, rate in enumerate(rates):
        # The last run of a request may be cut off by max_tokens.
        assert_rate(accepted[index], drafted[index], rate)
