"""Copies of rows and the ring of results."""

from typing import Any

import pytest
import torch

from tests.kernels.cuda_graphs import captured_graph
from tests.kernels.interpreter import on_each_kernel_device, only_outside_the_interpreter
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.slots.row_copies import (
    Rings,
    copy_rows,
    gather_rows,
    gather_slice_rows,
    send_results,
    store_in_rings,
)

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.int32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NUM_SLOTS, LENGTH = 6, 4


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random integers from -120 to 120."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-120, 121, shape, generator=generator).to(dtype)


def rings_of(width: int | None, device: str) -> Rings:
    """Rings filled with 1000, which no test stores."""
    size = NUM_SLOTS * LENGTH
    states = (
        None
        if width is None
        else torch.full((size, width), 1000.0, device=device, dtype=torch.bfloat16)
    )
    return Rings(LENGTH, torch.full((size,), 1000, device=device), states)


def test_a_position_is_stored_modulo_the_length_in_its_slots_ring() -> None:
    rings = rings_of(2, "cpu")
    states = torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16)
    store_in_rings(
        rings, torch.tensor([5, 0]), torch.tensor([7, 8]), torch.tensor([70, 80]), states
    )
    assert rings.tokens.nonzero().numel() == NUM_SLOTS * LENGTH and rings.states is not None
    changed = (rings.tokens != 1000).nonzero().flatten().tolist()
    assert changed == [0, 23] and rings.tokens[changed].tolist() == [80, 70]
    assert (rings.states != 1000).any(-1).nonzero().flatten().tolist() == [0, 23]
    assert rings.states[[0, 23]].tolist() == [[3, 4], [1, 2]]


def test_indices_of_one_or_several_positions_per_slot() -> None:
    rings, slots = rings_of(None, "cpu"), torch.tensor([2, 1])
    assert rings.indices(slots, torch.tensor([4, 3])).tolist() == [8, 7]
    assert rings.indices(slots.unsqueeze(1), torch.tensor([[4, 5], [2, 3]])).tolist() == [
        [8, 9],
        [6, 7],
    ]


def test_states_are_required_if_and_only_if_the_rings_have_them() -> None:
    one = torch.tensor([1])
    for rings, states in ((rings_of(2, "cpu"), None), (rings_of(None, "cpu"), torch.zeros(1, 2))):
        with pytest.raises(AssertionError):
            store_in_rings(rings, one, one, one, states)


@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize(
    "shape", [(9,), (9, 1), (9, 7), (9, 2, 1, 12), (9, 1024), (9, 2500)], ids=str
)
@pytest.mark.parametrize("rows", [[8, 0, 3, 3, 1], [4], []], ids=len)
def test_rows_are_gathered_from_a_table(
    shape: tuple[int, ...], dtype: torch.dtype, rows: list[int], device: str
) -> None:
    assert has_kernels(torch.device(device))
    table, picked = numbers(*shape, dtype=dtype), torch.tensor(rows, dtype=torch.int64)
    found = gather_rows(table.to(device), picked.to(device))
    assert found.is_contiguous() and found.dtype == dtype
    assert torch.equal(found.cpu(), table[picked])


def check_slice(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Rows 3 to 6 of a table are in the slice; a row outside has NaNs where it can."""
    table, picked = numbers(*shape, dtype=dtype), torch.tensor([8, 3, 2, 6, 6, 7, 0, 4])
    if dtype.is_floating_point:
        table[3], table[2] = torch.nan, torch.nan
    expected = table[picked]
    expected[[0, 2, 5, 6]] = 0
    found = gather_slice_rows(table[3:7].to(device), picked.to(device), 3)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", [(9, 1), (9, 7), (9, 2500)], ids=str)
def test_rows_outside_of_a_slice_are_zeros(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    check_slice(shape, dtype, device)


@only_outside_the_interpreter
@on_each_dtype
def test_the_references_rows_outside_of_a_slice_are_zeros(dtype: torch.dtype) -> None:
    check_slice((9, 7), dtype, "cpu")


@on_each_kernel_device
def test_a_table_and_its_row_numbers_may_be_views(device: str) -> None:
    table = numbers(9, 40, dtype=torch.int64)
    rows = torch.tensor([1, 8, 0, 5])
    found = gather_rows(table.to(device)[:, 3:7], rows.to(device)[1:])
    assert torch.equal(found.cpu(), table[rows[1:], 3:7])


@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 30), (3, 2049), (0, 8)], ids=str)
def test_rows_are_copied_into_a_part_of_a_wider_buffer(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    source, (num_rows, size) = numbers(*shape, dtype=dtype), shape
    buffer = numbers(num_rows + 2, 3 * size, dtype=dtype, seed=1)
    expected = buffer.clone()
    expected[:num_rows, size : 2 * size] = source
    buffer = buffer.to(device)
    copy_rows(source.to(device), buffer[:num_rows, size : 2 * size])
    assert torch.equal(buffer.cpu(), expected)


@on_each_kernel_device
def test_copied_rows_may_come_from_a_wider_buffer(device: str) -> None:
    wide = numbers(8, 90, dtype=torch.bfloat16).to(device)
    narrow = torch.zeros(4, 30, dtype=torch.bfloat16, device=device)
    copy_rows(wide[::2, 30:60], narrow)
    assert torch.equal(narrow, wide[::2, 30:60])


@on_each_kernel_device
@pytest.mark.parametrize("width", [None, 1, 30, 1024, 3000], ids=str)
def test_the_kernel_fills_rings_like_the_reference(width: int | None, device: str) -> None:
    slots, positions = torch.tensor([3, 0, 5]), torch.tensor([4, 3, 123_456_789_011])
    tokens = numbers(3, 2, dtype=torch.int64)[:, 0]
    states = None if width is None else numbers(3, 2 * width, dtype=torch.bfloat16)[:, :width]
    expected, rings = rings_of(width, "cpu"), rings_of(width, device)
    store_in_rings.reference(expected, slots, positions, tokens, states)
    given: list[Any] = [
        each if each is None else each.to(device) for each in (slots, positions, tokens, states)
    ]
    store_in_rings(rings, *given)
    assert torch.equal(rings.tokens.cpu(), expected.tokens)
    if rings.states is not None and expected.states is not None:
        assert torch.equal(rings.states.cpu(), expected.states)


@pytest.mark.gpu
def test_a_captured_graph_reads_its_inputs_at_replay() -> None:
    table, rows = (
        numbers(50, 4096, dtype=torch.bfloat16).cuda(),
        torch.tensor([1, 2, 3], device="cuda"),
    )
    rings, positions = rings_of(2 * 4096, "cuda"), torch.tensor([5, 6, 7], device="cuda")
    wide = torch.zeros(3, 2 * 4096, dtype=torch.bfloat16, device="cuda")
    in_slice = torch.zeros_like(wide[:, :4096])

    def run() -> torch.Tensor:
        found = gather_rows(table, rows)
        copy_rows(found, wide[:, 4096:])
        store_in_rings(rings, rows, positions, rows, wide)
        copy_rows(gather_slice_rows(table[2:4], rows, 2), in_slice)
        return found

    graph, found = captured_graph(lambda: run())
    for picked in ([4, 5, 0], [2, 2, 1]):
        rows.copy_(torch.tensor(picked))
        positions.add_(1)
        graph.replay()
        assert torch.equal(found, table[rows]) and torch.equal(wide[:, 4096:], table[rows])
        is_inside = ((rows >= 2) & (rows < 4)).unsqueeze(1)
        assert torch.equal(in_slice, table[rows] * is_inside)
        assert rings.states is not None
        assert torch.equal(rings.states[rings.indices(rows, positions)][-1], wide[-1])
        assert torch.equal(rings.tokens[rings.indices(rows, positions)], rows)


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
