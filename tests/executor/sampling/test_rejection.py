import pytest
import torch

from tests.executor.sampling.chi_square import p_value
from tllm_spec.executor.sampling.acceptance_rules import reject_chain
from tllm_spec.kernels.sampling.gumbel import DRAFT_DOMAIN, gumbel_noise

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
