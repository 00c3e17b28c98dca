"""Blocks of a prompt's rows: the reference against steps row by row, and the kernel against the
reference."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device, only_outside_the_interpreter
from tests.kernels.row_counts import ragged_rows, rows_of
from tests.kernels.test_gated_delta import SHAPES, memory_of, projections, rows_in, weights_of
from tllm_spec.kernels.states.delta_blocks import delta_blocks
from tllm_spec.kernels.states.gated_delta import (
    DeltaBlocks,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    gated_delta,
)

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
def test_the_kernel_equals_the_reference(
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
def test_forwards_that_cut_a_prompt_between_blocks_leave_the_same_bits() -> None:
    shape, weights = SHAPES["odd"], weights_of(SHAPES["odd"])
    projected, memories, found = projections(shape, 37), [memory_of(shape), memory_of(shape)], []
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
