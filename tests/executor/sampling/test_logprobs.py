from math import inf as INF

import torch

from tllm_spec.executor.sampling.logits import log_probabilities, logprob_entry, token_logprobs
from tllm_spec.outputs import Logprob

RAW = torch.tensor([[1.0, 4.0, 3.0, 2.0], [0.0, 0.0, 5.0, 0.0]]).log_softmax(-1)


def entries(tokens: list[int], num_best: int) -> list[dict[int, Logprob]]:
    values, ids = token_logprobs(RAW, torch.tensor(tokens), num_best)
    return [
        logprob_entry(*row, num_best) for row in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def test_the_chosen_token_comes_first_with_its_rank_whatever_it_is() -> None:
    entry = entries([0, 2], 2)[0]
    assert list(entry) == [0, 1, 2] and [each.rank for each in entry.values()] == [4, 1, 2]
    assert [each.logprob for each in entry.values()] == RAW[0, [0, 1, 2]].tolist()


def test_a_chosen_token_that_is_among_the_best_is_not_repeated() -> None:
    entry = entries([1, 2], 2)[0]
    assert list(entry) == [1, 2] and [each.rank for each in entry.values()] == [1, 2]


def test_with_zero_best_tokens_only_the_chosen_one_is_there() -> None:
    assert [list(entry) for entry in entries([3, 2], 0)] == [[3], [2]]


def test_tied_tokens_share_the_better_rank() -> None:
    assert entries([0, 3], 0)[1][3].rank == 2


def test_more_best_tokens_than_the_vocabulary_has_are_all_of_them() -> None:
    assert [len(entry) for entry in entries([0, 0], 99)] == [4, 4]


def test_a_request_that_wants_fewer_than_its_neighbours_gets_fewer() -> None:
    values, ids = token_logprobs(RAW, torch.tensor([0, 0]), 3)
    assert list(logprob_entry(values[0].tolist(), ids[0].tolist(), 1)) == [0, 1]


def test_of_tied_tokens_the_lowest_ids_are_the_best() -> None:
    raw = torch.tensor([[-2.0, -1.0, -INF, -1.0, -2.0, -0.0, 0.0], [-3.0] * 7])
    values, ids = token_logprobs(raw, torch.tensor([0, 0]), 6)
    assert ids[:, 1:-1].tolist() == [[5, 6, 1, 3, 0, 4], [0, 1, 2, 3, 4, 5]]
    assert torch.equal(values[:, 1:-1], raw.gather(1, ids[:, 1:-1]))


def test_rows_of_log_probabilities_are_padded_to_a_multiple_of_16_bytes() -> None:
    for vocab_size in (4, 5, 7):
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
        found = log_probabilities(logits)
        assert found.shape[1] % 4 == 0 and (found[:, vocab_size:] == -INF).all()
        torch.testing.assert_close(found[:, :vocab_size], logits.log_softmax(-1))
