"""The grouped GEMMs with FP8 experts: that every weight has its own scale, the formula, that only
experts that are hit are read, and that a row has the same bits in every batch. Under Triton's
interpreter in a subprocess, and on a CUDA device (`-m gpu`) with the shapes of models."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tests.kernels.test_grouped_gemm import QWEN3, V3, Shape
from tllm_spec.kernels.experts.grouped_gemm import (
    TILINGS,
    ExpertWeights,
    block_rows_of,
    down,
    gate_up_silu,
    hit_experts,
)
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Less than a block of inputs, incomplete blocks, and one expert for everything.
SMALL = [Shape(5, 2, 96, 33), Shape(3, 1, 148, 200), Shape(1, 1, 300, 130)]


@dataclass(frozen=True)
class Problem:
    x: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    @property
    def rows(self) -> ExpertRows:
        number = len(self.gate_up)
        block_rows = block_rows_of(self.experts.numel(), number, self.x.dtype, self.x.device)
        return moe_permute(self.experts, number, block_rows)

    def of(self, tokens: slice) -> "Problem":
        own = (self.x[tokens], self.experts[tokens], self.weights[tokens])
        return replace(self, x=own[0], experts=own[1], weights=own[2])

    def layer(self) -> torch.Tensor:
        """Each assignment's output `[T * k, H]`."""
        rows = self.rows
        inner = gate_up_silu(self.x, ExpertWeights(self.gate_up, self.gate_up_scales), rows)
        return down(inner, ExpertWeights(self.down, self.down_scales), rows)


def problem(shape: Shape, num_tokens: int, dtype: torch.dtype, device: str) -> Problem:
    """Scales are powers of two and differ by expert, output and block of inputs."""
    generator = torch.Generator(device).manual_seed(num_tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def scales(*size: int) -> torch.Tensor:
        return torch.randint(-8, 1, size, generator=generator, device=device).float().exp2()

    experts, inner, hidden = shape.num_experts, shape.inner, shape.hidden
    return Problem(
        normal(num_tokens, hidden).to(dtype),
        normal(experts, 2 * inner, hidden).to(FP8),
        scales(experts, 2 * inner, -(-hidden // 128)),
        normal(experts, hidden, inner).to(FP8),
        scales(experts, hidden, -(-inner // 128)),
        normal(num_tokens, experts).argsort(-1)[:, : shape.top_k].int().contiguous(),
        normal(num_tokens, shape.top_k).sigmoid(),
    )


def exact(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In float64, block by block."""
    blocks = [
        part.double() * scales[..., block, None].double()
        for block, part in enumerate(weight.float().split(128, -1))
    ]
    return torch.cat(blocks, -1)


def sum_error(inputs: int) -> float:
    """The error of float32 sums over the sum of magnitudes. Tensor cores add 16 products of a block
    at a time. They cut 17 numbers off at 2^-25 of the largest and the sum at 2^-23: together less
    than 2^-20. The sums of blocks are added with one rounding each."""
    return 128 // 16 * 2.0**-20 + -(-inputs // 128) * 2.0**-24


def check_gate_up(
    p: Problem, output: torch.Tensor, input_weights: torch.Tensor | None = None
) -> None:
    """One rounding, after float32 sums."""
    rows, error, num_checked = p.rows, sum_error(p.x.shape[1]), 0
    for expert, first, end in hit_experts(rows):
        assignments, found = rows.order[first:end], output[first:end].double()
        own, x = exact(p.gate_up[expert], p.gate_up_scales[expert]).t(), p.x.double()
        x = x[assignments // rows.top_k]
        if input_weights is not None:
            x *= input_weights.flatten()[assignments, None].double()
        gate, up = (x @ own).chunk(2, -1)
        gate_error, up_error = (error * (x.abs() @ own.abs())).chunk(2, -1)
        expected = gate * gate.sigmoid() * up
        bound = 1.1 * gate_error * up.abs() + up_error * gate.abs() + 4 * gate_error * up_error
        bound += (ROUNDING[p.x.dtype] + error) * expected.abs() + 2.0**-24
        assert ((found - expected).abs() <= bound).all()
        num_checked += len(found)
    assert num_checked == len(output) == p.experts.numel()


def check_down(p: Problem, inner: torch.Tensor, output: torch.Tensor) -> None:
    """One rounding, after float32 sums."""
    rows, error, num_checked = p.rows, sum_error(inner.shape[1]), 0
    for expert, first, end in hit_experts(rows):
        found, x = output[rows.order[first:end]].double(), inner[first:end].double()
        own = exact(p.down[expert], p.down_scales[expert]).t()
        expected, magnitudes = x @ own, x.abs() @ own.abs()
        bound = ROUNDING[inner.dtype] * expected.abs() + error * magnitudes + 2.0**-24
        assert ((found - expected).abs() <= bound).all()
        num_checked += len(found)
    assert num_checked == len(output) == p.experts.numel()


def check_both(p: Problem) -> None:
    """Each GEMM on its own: the inputs of the second are the outputs of the first."""
    rows, gate_up = p.rows, ExpertWeights(p.gate_up, p.gate_up_scales)
    check_gate_up(p, gate_up_silu(p.x, gate_up, rows, p.weights), p.weights)
    inner = gate_up_silu(p.x, gate_up, rows)
    check_gate_up(p, inner)
    check_down(p, inner, down(inner, ExpertWeights(p.down, p.down_scales), rows))


@on_each_dtype
@pytest.mark.parametrize("shape", SMALL, ids=str)
@only_outside_the_interpreter
def test_the_reference_equals_the_formula(shape: Shape, dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 9):
        check_both(problem(shape, num_tokens, dtype, "cpu"))


@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_kernel_equals_the_formula(shape: Shape, dtype: torch.dtype, device: str) -> None:
    for num_tokens in (0, 1, 9):
        check_both(problem(shape, num_tokens, dtype, device))


@pytest.mark.slow
@on_each_kernel_device
def test_the_bounds_tell_a_misplaced_scale(device: str) -> None:
    p = problem(Shape(3, 2, 300, 140 if INTERPRETED else 260), 9, torch.bfloat16, device)
    rows = p.rows
    inner = gate_up_silu(p.x, ExpertWeights(p.gate_up, p.gate_up_scales), rows)
    for wrong in misplaced(p.gate_up_scales):
        with pytest.raises(AssertionError):
            check_gate_up(p, gate_up_silu(p.x, ExpertWeights(p.gate_up, wrong), rows))
    for wrong in misplaced(p.down_scales):
        with pytest.raises(AssertionError):
            check_down(p, inner, down(inner, ExpertWeights(p.down, wrong), rows))


def misplaced(scales: torch.Tensor) -> Iterator[torch.Tensor]:
    """Scales of another expert, output or block; and one output's in another order."""
    for dim in range(3):
        yield scales.roll(1, dim)
    one, own = scales.clone(), scales[0]
    output = ((own[:, 0] - own[:, 1]).abs() / own.sum(-1)).argmax()
    one[0, output, :2] = own[output, :2].flip(0)
    yield one


@on_each_kernel_device
def test_every_weight_has_its_own_scale(device: str) -> None:
    """Rows of the identity give the weights themselves."""
    p = problem(Shape(3, 1, 72, 148), 150, torch.bfloat16, device)
    rows, weight = p.rows, exact(p.down, p.down_scales)
    inputs = torch.arange(150, device=device) % 148
    inner = torch.nn.functional.one_hot(inputs, 148).to(p.x.dtype)
    output = down(inner, ExpertWeights(p.down, p.down_scales), rows)
    for row, assignment in enumerate(rows.order.tolist()):
        own = weight[int(p.experts[assignment, 0])]
        assert torch.equal(output[assignment].double(), own[:, inputs[row]])


@on_each_kernel_device
def test_every_size_of_block_gives_the_formula(device: str) -> None:
    seen = set()
    for num_tokens in (3, 30, 70, 150):
        p = problem(Shape(2, 1, 136, 40), num_tokens, torch.bfloat16, device)
        seen.add(block_rows_of(num_tokens, 2, torch.bfloat16, p.x.device, "fp8"))
        check_both(p)
    assert seen == set(TILINGS["fp8"])


@on_each_kernel_device
def test_experts_that_no_token_takes_are_not_read(device: str) -> None:
    """Their scales are NaN, and so is whatever is computed with them."""
    p = problem(Shape(8, 2, 64, 48), 5, torch.float32, device)
    p.experts[:] = torch.tensor([5, 2], dtype=torch.int32)
    for scales in (p.gate_up_scales, p.down_scales):
        scales[[0, 1, 3, 4, 6, 7]] = torch.nan
    check_both(p)


@on_each_kernel_device
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str, exact_dots: None) -> None:
    p = problem(Shape(4, 2, 136, 150), 100, torch.bfloat16, device)
    expected = p.layer().view(100, 2, -1)
    for tokens in (slice(99, 100), slice(3, 9), slice(10, 50)):  # smaller blocks
        assert torch.equal(p.of(tokens).layer().view(-1, 2, 136), expected[tokens])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [QWEN3, V3], ids=str)
def test_real_sizes_equal_the_formula_on_the_device(shape: Shape) -> None:
    for num_tokens in (1, 4, 64, 200, 500, 2000):
        check_both(problem(shape, num_tokens, torch.bfloat16, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
def test_the_number_of_rows_changes_no_bit_of_a_row_on_the_device() -> None:
    p = problem(QWEN3, 4096, torch.bfloat16, "cuda")
    expected = p.layer().view(4096, 8, -1)
    for number in (1, 2, 16, 64, 130, 300, 900, 2000):
        tokens = slice(37, 37 + number)
        assert torch.equal(p.of(tokens).layer().view(number, 8, -1), expected[tokens]), number
