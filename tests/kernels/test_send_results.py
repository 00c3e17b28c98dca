"""The ring of results: the layout of an entry, and the kernel against the reference with the whole
ring compared."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.slots.row_copies import send_results

NOTHING = -7


def empty_ring(depth: int, num_values: int, *, pinned: bool = False) -> torch.Tensor:
    return torch.full((depth, 1 + num_values), NOTHING, pin_memory=pinned)


def results(num_rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 2**40, (num_rows, width), generator=generator)
    return torch.randint(1, 1 + width, (num_rows,), generator=generator), tokens


def test_an_entry_has_its_number_and_each_requests_length_and_tokens() -> None:
    ring, number = empty_ring(2, 7), torch.tensor([8])
    send_results(ring, number, torch.tensor([2, 1]), torch.tensor([[5, 6], [7, -1]]))
    assert ring.tolist() == [[8, 2, 5, 6, 1, 7, -1, NOTHING], [NOTHING] * 8]
    send_results(ring, number, torch.tensor([1]), torch.tensor([[4]]))
    assert ring[1].tolist() == [9, 1, 4, *[NOTHING] * 5]
    assert number.tolist() == [10]


@on_each_kernel_device
@pytest.mark.parametrize(
    ("num_rows", "width"),
    [(1, 1), (1, 9), (3, 4), (64, 4), (85, 2), (86, 2), (128, 1), (129, 1), (300, 9)],
)
def test_the_kernel_writes_the_same_entries_as_the_reference(
    device: str, num_rows: int, width: int
) -> None:
    """255, 256 and 258 values are just below, at and above one block."""
    capacity = num_rows * (1 + width) + 5
    ring, expected = empty_ring(3, capacity, pinned=device == "cuda"), empty_ring(3, capacity)
    number, expected_number = torch.tensor([4], device=device), torch.tensor([4])
    for seed in range(5):
        lens, tokens = results(num_rows, width, seed)
        send_results.reference(expected, expected_number, lens, tokens)
        send_results(ring, number, lens.to(device), tokens.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(ring, expected) and torch.equal(number.cpu(), expected_number)
    assert (ring[:, -5:] == NOTHING).all()


@on_each_kernel_device
def test_results_need_not_be_contiguous(device: str) -> None:
    lens, tokens = results(6, 8, 0)
    ring, expected = empty_ring(2, 30, pinned=device == "cuda"), empty_ring(2, 30)
    send_results.reference(expected, torch.tensor([0]), lens[::2], tokens[::2, :4])
    number = torch.tensor([0], device=device)
    send_results(ring, number, lens.to(device)[::2], tokens.to(device)[::2, :4])
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(ring, expected)


def test_results_that_do_not_fit_an_entry_are_refused() -> None:
    with pytest.raises(AssertionError):
        send_results(empty_ring(2, 5), torch.tensor([0]), *results(3, 1, 0))
