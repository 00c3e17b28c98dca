"""The K best tokens of a row: order of ties, values that are no numbers, coupled noise, and the
kernels against the reference."""

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tllm_spec.kernels.drafts.top_tokens import top_tokens
from tllm_spec.kernels.sampling.choose_token import choose_draft

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
