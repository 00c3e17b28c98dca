"""The grouped GEMMs of a mixture of experts: the formula, that only experts that are hit are read,
and that a row has the same bits in every batch. Under Triton's interpreter in a subprocess, and on
a CUDA device (`-m gpu`) with the shapes of models."""

from dataclasses import dataclass

import pytest
import torch

from tests.kernels.interpreter import (
    INTERPRETED,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.grouped_gemm import (
    TILINGS,
    ExpertWeights,
    block_rows_of,
    down,
    gate_up_silu,
    hit_experts,
)
from tllm_spec.kernels.experts.permute import moe_permute

TOLERANCE = {torch.float32: 6e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
on_each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    hidden: int
    inner: int


# Sizes that are not multiples of a block, and one expert for everything.
SMALL = [Shape(8, 2, 64, 48), Shape(5, 3, 200, 33), Shape(1, 1, 32, 64), Shape(6, 2, 130, 128)]
QWEN3 = Shape(128, 8, 2048, 768)
V3 = Shape(64, 8, 2048, 1408)


@dataclass(frozen=True)
class Problem:
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def problem(shape: Shape, num_tokens: int, dtype: torch.dtype, device: str) -> Problem:
    generator = torch.Generator(device).manual_seed(num_tokens)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device) * scale

    inner, hidden = shape.inner, shape.hidden
    return Problem(
        normal(num_tokens, hidden).to(dtype),
        normal(shape.num_experts, 2 * inner, hidden, scale=hidden**-0.5).to(dtype),
        normal(shape.num_experts, hidden, inner, scale=inner**-0.5).to(dtype),
        normal(num_tokens, shape.num_experts).argsort(-1)[:, : shape.top_k].int().contiguous(),
        normal(num_tokens, shape.top_k).sigmoid(),
    )


def layer(p: Problem, input_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Each assignment's output `[T * k, H]`."""
    number = p.gate_up.shape[0]
    block_rows = block_rows_of(p.experts.numel(), number, p.x.dtype, p.x.device)
    rows = moe_permute(p.experts, number, block_rows)
    inner = gate_up_silu(p.x, ExpertWeights(p.gate_up), rows, input_weights)
    return down(inner, ExpertWeights(p.down), rows)


def formula(p: Problem, input_weights: torch.Tensor | None = None) -> torch.Tensor:
    """In float64, assignment by assignment, with SwiGLU rounded as the layers store it."""
    outputs = []
    for token, ids in enumerate(p.experts.tolist()):
        for choice, expert in enumerate(ids):
            gate_up = p.gate_up[expert].double() @ p.x[token].double()
            if input_weights is not None:
                gate_up *= input_weights[token, choice].double()
            gate, up = gate_up.chunk(2)
            activated = (gate * gate.sigmoid() * up).to(p.x.dtype).double()
            outputs.append(p.down[expert].double() @ activated)
    return torch.stack(outputs) if outputs else p.x.new_empty(0, p.down.shape[1]).double()


def check(output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@on_each_dtype
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_reference_equals_the_formula(shape: Shape, dtype: torch.dtype) -> None:
    for num_tokens in (0, 1, 9):
        p = problem(shape, num_tokens, dtype, "cpu")
        for weights in (None, p.weights):
            check(layer(p, weights), formula(p, weights))


@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_kernel_equals_the_formula(shape: Shape, dtype: torch.dtype, device: str) -> None:
    assert has_kernels(torch.device(device))
    for num_tokens in (0, 1, 9, 40):
        p = problem(shape, num_tokens, dtype, device)
        check(layer(p), formula(p))
    check(layer(p, p.weights), formula(p, p.weights))


@on_each_kernel_device
def test_every_size_of_block_gives_the_formula(device: str) -> None:
    shape, seen = Shape(4, 2, 96, 80), set()
    for num_tokens in (3, 30, 90, 150):
        p = problem(shape, num_tokens, torch.bfloat16, device)
        seen.add(block_rows_of(p.experts.numel(), 4, torch.bfloat16, p.x.device))
        check(layer(p), formula(p))
    assert seen == set(TILINGS["plain"])


@on_each_kernel_device
@pytest.mark.parametrize("num_tokens", [2, 150])
def test_experts_that_no_token_takes_are_not_read(num_tokens: int, device: str) -> None:
    """Their weights are NaN, and so is whatever is computed with them."""
    p = problem(Shape(8, 2, 64, 48), num_tokens, torch.float32, device)
    p.experts[:] = torch.tensor([5, 2], dtype=torch.int32)
    unused = [0, 1, 3, 4, 6, 7]
    p.gate_up[unused], p.down[unused] = torch.nan, torch.nan
    check(layer(p), formula(p))


@on_each_kernel_device
def test_all_tokens_may_take_the_same_expert(device: str) -> None:
    p = problem(Shape(6, 1, 64, 48), 70, torch.bfloat16, device)
    p.experts.fill_(3)
    check(layer(p), formula(p))


@on_each_kernel_device
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    p = problem(Shape(4, 2, 96, 80), 150, torch.bfloat16, device)
    expected = layer(p).view(150, 2, -1)
    for tokens in (slice(0, 1), slice(149, 150), slice(3, 9), slice(10, 80)):
        alone = Problem(p.x[tokens], p.gate_up, p.down, p.experts[tokens], p.weights[tokens])
        assert torch.equal(layer(alone).view(-1, 2, 96), expected[tokens])


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference_with_one_block_per_expert() -> None:
    p = problem(SMALL[0], 40, torch.float32, "cpu")
    rows = moe_permute(p.experts, 8, block_rows_of(80, 8, torch.float32, p.x.device))
    assert int(rows.num_blocks) == len(p.experts.unique())
    by_blocks = moe_permute.reference(p.experts, 8, 16)
    activated = gate_up_silu.reference(p.x, ExpertWeights(p.gate_up), by_blocks)
    expected = down.reference(activated, ExpertWeights(p.down), by_blocks)
    torch.testing.assert_close(layer(p), expected)


def one_by_one(p: Problem) -> torch.Tensor:
    """`layer` with torch's GEMMs in float32, over the experts that are hit."""
    rows = moe_permute.reference(p.experts, p.gate_up.shape[0], p.experts.numel())
    output = p.x.new_empty(p.experts.numel(), p.down.shape[1], dtype=torch.float32)
    for expert, first, end in hit_experts(rows):
        own = rows.order[first:end]
        gate, up = (p.x[own // rows.top_k].float() @ p.gate_up[expert].float().t()).chunk(2, -1)
        activated = (gate * gate.sigmoid() * up).to(p.x.dtype).float()
        output[own] = activated @ p.down[expert].float().t()
    return output


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [QWEN3, V3], ids=str)
def test_real_sizes_equal_torch_on_the_device(shape: Shape) -> None:
    for num_tokens in (1, 4, 64, 200, 500, 4096):
        p = problem(shape, num_tokens, torch.bfloat16, "cuda")
        check(layer(p), one_by_one(p).double())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
def test_the_number_of_rows_changes_no_bit_of_a_row_on_the_device() -> None:
    p = problem(QWEN3, 4096, torch.bfloat16, "cuda")
    expected = layer(p).view(4096, 8, -1)
    for number in (1, 2, 16, 64, 130, 300, 900, 2000):
        tokens = slice(37, 37 + number)
        part = Problem(p.x[tokens], p.gate_up, p.down, p.experts[tokens], p.weights[tokens])
        assert torch.equal(layer(part).view(number, 8, -1), expected[tokens]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_a_captured_graph_follows_the_routing_at_replay() -> None:
    static = problem(QWEN3, 16, torch.bfloat16, "cuda")
    layer(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(static)
    for hit in (8, 128):
        experts = torch.rand(16, hit, device="cuda").argsort(-1)[:, :8]
        static.experts.copy_(experts)
        graph.replay()
        check(output, one_by_one(static).double())
