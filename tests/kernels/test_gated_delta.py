"""Gated delta nets: the states of windows and the blocks of prompts."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import (
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tests.kernels.row_counts import ragged_rows, rows_of
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.states.delta_blocks import delta_blocks
from tllm_spec.kernels.states.gated_delta import (
    DeltaBlocks,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    gated_delta,
    gated_norm,
)

SHAPES = {
    "odd": DeltaShape(2, 4, 8, 6, 4),
    "one head": DeltaShape(1, 1, 5, 16, 2),
    "as published": DeltaShape(2, 4, 128, 128, 4),
}
WINDOW, SLOTS = 4, 5
# Row 3 comes after row 1, row 2 after the root.
TREE = [0b1, 0b11, 0b101, 0b1011]


def weights_of(
    shape: DeltaShape, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(shape.num_channels, shape.kernel_size, generator=generator) * 0.5
    gates = torch.randn(2, shape.num_value_heads, generator=generator)
    return DeltaWeights(conv.to(device, dtype), *gates.to(device))


def memory_of(
    shape: DeltaShape,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> DeltaMemory:
    """Something is in each slot."""
    generator, ring = torch.Generator().manual_seed(2), 2 * WINDOW + shape.kernel_size - 1
    heads = shape.num_value_heads, shape.key_dim, shape.value_dim
    states = torch.randn(SLOTS, *heads, generator=generator)
    inputs = torch.randn(SLOTS, ring, shape.num_inputs, generator=generator)
    return DeltaMemory(states.to(device, state_dtype), inputs.to(device, dtype))


def projections(shape: DeltaShape, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, shape.num_projected, generator=generator)


def rows_in(
    slots: list[int],
    first: list[int],
    rows: RoundRows,
    pending: list[int] | None = None,
    *,
    are_kept: bool = False,
    tree: list[int] | None = None,
    device: str = "cpu",
) -> DeltaRows:
    waiting = torch.tensor(pending or [0] * len(slots), device=device)
    bits = None if tree is None else torch.tensor([tree] * len(slots), device=device)
    numbers = torch.tensor([slots, first], device=device)
    return DeltaRows(numbers[0], numbers[1], waiting, rows, are_kept, bits)


def answers_of(
    run: Callable[..., None], projected: torch.Tensor, memory: DeltaMemory, *more: Any
) -> torch.Tensor:
    sizes = len(projected), memory.states.shape[1], memory.states.shape[3]
    output = projected.new_empty(sizes, dtype=torch.float32)
    run(projected, memory, *more, output)
    return output


CASES = {
    "windows": rows_in([3, 0, 1], [9, 7, 2], rows_of([4, 4, 4]), [0, 4, 2]),
    "single rows": rows_in([1, 2], [1, 30], rows_of([1, 1]), [1, 3]),
    "parts of windows": rows_in([3, 0, 1], [9, 7, 2], ragged_rows([1, 4, 2], 4), [2, 3, 0]),
    "trees": rows_in([4, 2], [21, 3], rows_of([4, 4]), [1, 3], tree=TREE),
    "prompts": rows_in([0, 3, 2], [0, 0, 13], ragged_rows([14, 2, 5], 14), are_kept=True),
}


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_the_reference(
    shape: str, case: str, dtype: torch.dtype, device: str
) -> None:
    own, rows = SHAPES[shape], CASES[case]
    projected = projections(own, rows.rows.num_rows).to(dtype)
    expected, weights = memory_of(own, dtype=dtype), weights_of(own, dtype=dtype)
    answers = answers_of(gated_delta.reference, projected, expected, own, weights, rows)
    found, on_device = memory_of(own, device, dtype), _on(rows, device)
    given = projected.to(device), found, own, weights_of(own, device, dtype), on_device
    output = answers_of(gated_delta, *given)
    torch.testing.assert_close(output.cpu(), answers, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.states.cpu(), expected.states, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.inputs.cpu(), expected.inputs)


def _on(rows: DeltaRows, device: str) -> DeltaRows:
    offsets, tree = rows.rows.offsets, rows.tree
    return DeltaRows(
        *(each.to(device) for each in (rows.slots, rows.first, rows.pending)),
        replace(rows.rows, offsets=None if offsets is None else offsets.to(device)),
        rows.are_kept,
        None if tree is None else tree.to(device),
    )


STATE_DTYPES = pytest.mark.parametrize(
    "state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


@on_each_kernel_device
@STATE_DTYPES
@pytest.mark.interpreted("state_dtype", torch.bfloat16)
def test_windows_go_on_from_a_prompt_as_plain_decoding_does(
    state_dtype: torch.dtype, device: str
) -> None:
    """The kernel's ring, states and pending rows fit each other, bit by bit."""
    shape, weights = SHAPES["odd"], weights_of(SHAPES["odd"], device)
    projected = projections(shape, 34).to(device)
    memory, plain = (memory_of(shape, device, state_dtype=state_dtype) for _ in range(2))
    answers = list[torch.Tensor]()
    for each in (plain, memory):
        prompt = rows_in([1], [0], rows_of([21]), are_kept=True, device=device)
        answers_of(gated_delta, projected[:21], each, shape, weights, prompt)
    assert torch.equal(plain.states, memory.states)
    for first in range(21, 31):
        row = rows_in([1], [first], rows_of([1]), [int(first > 21)], device=device)
        own = projected[first : first + 1]
        answers.append(answers_of(gated_delta, own, plain, shape, weights, row))
    first, waiting = 21, 0
    for accepted in (4, 1, 3, 2):
        window = projected[first : first + 4].clone()
        window[accepted:] += 1.0  # these drafts are wrong
        rows = rows_in([1], [first], rows_of([len(window)]), [waiting], device=device)
        found = answers_of(gated_delta, window, memory, shape, weights, rows)
        for index in range(min(accepted, len(window))):
            assert torch.equal(found[index : index + 1], answers[first - 21 + index])
        first, waiting = first + accepted, accepted


@on_each_kernel_device
@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["windows", "trees", "prompts", "blocks"])
@pytest.mark.interpreted("case", "windows", "blocks")
def test_a_state_of_16_bits_is_rounded_as_the_reference_rounds_it(
    case: str, state_dtype: torch.dtype, device: str
) -> None:
    """Sums of another order may be rounded to the next number, of which few are."""
    shape, in_blocks = SHAPES["odd"], case == "blocks"
    rows = prompts(8) if in_blocks else CASES[case]
    projected, bits = projections(shape, rows.rows.num_rows), torch.finfo(state_dtype).eps
    expected, found = (memory_of(shape, on, state_dtype=state_dtype) for on in ("cpu", device))
    weights = weights_of(shape)
    answers = run(projected, expected, shape, weights, rows, by_reference=True)
    own = prompts(8, device) if in_blocks else _on(rows, device)
    output = run(projected.to(device), found, shape, weights_of(shape, device), own)
    assert found.states.dtype == state_dtype
    for result, right in ((output, answers), (found.states, expected.states)):
        errors = (result.cpu().float() - right.float()).abs()
        assert errors.max() <= 8 * bits * right.abs().max() + 1e-5
        assert errors.mean() <= 0.02 * bits + 1e-6


@only_outside_the_interpreter
@pytest.mark.parametrize("kernel_size", [2, 4])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(kernel_size: int) -> None:
    shape = replace(SHAPES["odd"], kernel_size=kernel_size)
    weights, projected = weights_of(shape), projections(shape, 4)
    tree = rows_in([2], [9], rows_of([4]), [2], tree=TREE)
    found = answers_of(gated_delta.reference, projected, memory_of(shape), shape, weights, tree)
    for path in ([0, 1, 3], [0, 2]):
        chain = rows_in([2], [9], rows_of([len(path)]), [2])
        expected = answers_of(
            gated_delta.reference, projected[path], memory_of(shape), shape, weights, chain
        )
        assert torch.equal(found[path], expected)


@only_outside_the_interpreter
@STATE_DTYPES
@pytest.mark.parametrize("parts", [(12,), (1, 11), (5, 5, 2), (1,) * 12])
def test_chunks_of_a_prompt_leave_the_same_bits(
    parts: tuple[int, ...], state_dtype: torch.dtype
) -> None:
    shape, weights = SHAPES["odd"], weights_of(SHAPES["odd"])
    memory, whole = (memory_of(shape, state_dtype=state_dtype) for _ in range(2))
    projected, first = projections(shape, 12), 0
    found = []
    for part in parts:
        rows = rows_in([1], [first], rows_of([part]), are_kept=True)
        piece = projected[first : first + part]
        found.append(answers_of(gated_delta.reference, piece, memory, shape, weights, rows))
        first += part
    rows = rows_in([1], [0], rows_of([12]), are_kept=True)
    expected = answers_of(gated_delta.reference, projected, whole, shape, weights, rows)
    assert torch.equal(torch.cat(found), expected) and torch.equal(memory.states, whole.states)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_equals_its_reference(dtype: torch.dtype, device: str) -> None:
    heads, both = torch.randn(3, 4, 6), torch.randn(3, 40).to(dtype)
    weight, gates = torch.randn(6).to(dtype), both[:, 16:]
    expected = gated_norm.reference(heads, gates, weight, 1e-6)
    found = gated_norm(heads.to(device), both.to(device)[:, 16:], weight.to(device), 1e-6)
    check_like_the_reference(found.cpu(), expected)


NUM_BLOCKS = [2, 0, 1]


def prompts(size: int, device: str = "cpu") -> DeltaRows:
    """Rows of three requests, two of which have blocks; the last one is longer than a ring."""
    counts = [2 * size + 3, 5, size]
    rows = ragged_rows(counts, max(counts), device)
    own = rows_in([0, 3, 2], [0, 0, 16], rows, are_kept=True, device=device)
    owners = [request for request, number in enumerate(NUM_BLOCKS) for _ in range(number)]
    numbers = [torch.tensor(each, device=device).int() for each in ([0, 2, 2, 3], owners)]
    assert numbers[0].tolist() == [0, *accumulate(NUM_BLOCKS)]
    return replace(own, blocks=DeltaBlocks(size, *numbers))


def run(
    projected: torch.Tensor,
    memory: DeltaMemory,
    shape: DeltaShape,
    weights: DeltaWeights,
    rows: DeltaRows,
    *,
    by_reference: bool = False,
) -> torch.Tensor:
    """The answers to all rows."""
    output = projected.new_full((len(projected), shape.num_value_heads, shape.value_dim), torch.nan)
    output, given = output.float(), (projected, memory, shape, weights, rows)
    for operation in (*([delta_blocks] if rows.blocks else []), gated_delta):
        (operation.reference if by_reference else operation)(*given, output)
    return output


@only_outside_the_interpreter
@pytest.mark.parametrize("keys", ["different", "alike"])
@pytest.mark.parametrize("size", [8, 64])
def test_blocks_give_what_steps_give(size: int, keys: str) -> None:
    """Rows with nearly the same keys make the system's inverse, and its powers, large."""
    shape, rows = SHAPES["as published"], prompts(size)
    weights, projected = weights_of(shape), projections(shape, rows.rows.num_rows)
    if keys == "alike":
        projected[:] = projected[:1] + 0.01 * projected
        weights.a_log.fill_(-8.0)
    memory, expected = memory_of(shape), memory_of(shape)
    found = run(projected, memory, shape, weights, rows)
    answers = run(projected, expected, shape, weights, replace(rows, blocks=None))
    for own, other in ((found, answers), (memory.states, expected.states)):
        assert (own - other).abs().max() < 1e-5 * other.abs().max()
    assert torch.equal(memory.inputs, expected.inputs)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "size"), [("odd", 8), ("one head", 16), ("as published", 64)])
def test_the_kernel_equals_the_reference_of_blocks(
    shape: str, size: int, dtype: torch.dtype, device: str
) -> None:
    own, rows = SHAPES[shape], prompts(size)
    projected, weights = (
        projections(own, rows.rows.num_rows).to(dtype),
        weights_of(own, dtype=dtype),
    )
    expected, found = memory_of(own, dtype=dtype), memory_of(own, device, dtype)
    answers = run(projected, expected, own, weights, rows, by_reference=True)
    given = projected.to(device), found, own, weights_of(own, device, dtype), prompts(size, device)
    # A 16-bit model's products are of TF32 on a GPU.
    bound = 1e-5 if dtype == torch.float32 or device == "cpu" else 5e-3
    for result, right in ((run(*given), answers), (found.states, expected.states)):
        assert (result.cpu() - right).abs().max() < bound * right.abs().max()
    assert torch.equal(found.inputs.cpu(), expected.inputs)


@only_outside_the_interpreter
@STATE_DTYPES
def test_forwards_that_cut_a_prompt_between_blocks_leave_the_same_bits(
    state_dtype: torch.dtype,
) -> None:
    shape, weights = SHAPES["odd"], weights_of(SHAPES["odd"])
    memories = [memory_of(shape, state_dtype=state_dtype) for _ in range(2)]
    projected, found = projections(shape, 37), []
    for memory, ends in zip(memories, ([37], [8, 24, 34, 37]), strict=True):
        first, answers = 0, list[torch.Tensor]()
        for end in ends:
            rows = rows_in([1], [first], rows_of([end - first]), are_kept=True)
            if number := (min(end, 35) - first) // 8:
                starts = torch.tensor([0, number]).int()
                blocks = DeltaBlocks(8, starts, torch.zeros(number).int())
                rows = replace(rows, blocks=blocks)
            answers.append(run(projected[first:end], memory, shape, weights, rows))
            first = end
        found.append(torch.cat(answers))
    assert torch.equal(*found) and torch.equal(*(memory.states for memory in memories))
