"""The kernel against its reference, and both against the formula in float64."""

import math

import pytest
import torch

from tests.kernels.interpreter import (
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.norms import Activation, silu_and_mul

SHAPES = [(1, 14336), (3, 192), (5, 100), (2, 1), (4, 1025), (0, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Absolute tolerance; float16 results may be denormal.
SMALLEST = {torch.float32: 1e-30, torch.float16: 6e-8, torch.bfloat16: 1e-30}
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# With the absolute error by gate times up: torch's sum in GELU cancels for gates below 0.
ACTIVATIONS = {"silu": 0.0, "gelu_pytorch_tanh": 2.0**-23}
on_each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def gate_and_up(
    shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    """`[T, 2 * I]`; gates of about -12 to 12."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape[0], 2 * shape[1], generator=generator) * 4).to(device, dtype)


def expected(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    tanh = (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()
    return gate * (1 + tanh) / 2 * up


def check(output: torch.Tensor, gate_up: torch.Tensor, activation: Activation = "silu") -> None:
    dtype, (gate, up) = gate_up.dtype, gate_up.double().chunk(2, -1)
    assert output.dtype == dtype and output.is_contiguous()
    # One rounding of the result, plus the error of the exponential and the division.
    wanted = expected(gate_up, activation)
    most = (ROUNDING[dtype] + 2e-6) * wanted.abs() + SMALLEST[dtype]
    most += ACTIVATIONS[activation] * (gate * up).abs()
    assert ((output.double() - wanted).abs() <= most).all()


@on_each_activation
@on_each_shape
@on_each_dtype
def test_the_reference_equals_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = gate_and_up(shape, dtype)
    check(silu_and_mul.reference(gate_up, activation), gate_up, activation)


@on_each_kernel_device
@on_each_activation
@on_each_shape
@on_each_dtype
def test_the_kernel_equals_the_formula_and_its_reference(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation, device: str
) -> None:
    assert has_kernels(torch.device(device))
    gate_up = gate_and_up(shape, dtype, device)
    before = gate_up.clone()
    output = silu_and_mul(gate_up, activation)
    check(output, gate_up, activation)
    assert torch.equal(gate_up, before)
    if activation == "silu":
        check_like_the_reference(output, silu_and_mul.reference(gate_up))


@on_each_kernel_device
@on_each_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_gates_overflow_like_torch(
    dtype: torch.dtype, activation: Activation, device: str
) -> None:
    gates = torch.tensor([-87.0, -89.0, -1e4, -3e38, 0.0, 88.0, 3e38, torch.inf, torch.nan])
    gate_up = torch.stack((gates, torch.full_like(gates, 0.5)), 0).flatten()[None].to(device, dtype)
    output = silu_and_mul(gate_up, activation)
    plain = silu_and_mul.reference(gate_up, activation)
    torch.testing.assert_close(output, plain, rtol=0.02, atol=1e-36, equal_nan=True)
    assert output[0, -1].isnan() and output[0, :-1].isnan().sum() == 0


@on_each_kernel_device
@on_each_dtype
def test_rows_may_be_a_view(dtype: torch.dtype, device: str) -> None:
    wide = gate_and_up((5, 300), dtype, device)
    view = wide[1::2, 7:407]
    check(silu_and_mul(view), view)


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference() -> None:
    gate_up = gate_and_up((3, 100), torch.bfloat16)
    assert torch.equal(silu_and_mul(gate_up), silu_and_mul.reference(gate_up))


@pytest.mark.gpu
@on_each_dtype
def test_a_captured_graph_reads_its_input_at_replay(dtype: torch.dtype) -> None:
    static = gate_and_up((6, 14336), dtype, "cuda")
    silu_and_mul(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = silu_and_mul(static)
    for seed in (1, 2):
        static.copy_(gate_and_up((6, 14336), dtype, seed=seed))
        graph.replay()
        check(output, static)


@pytest.mark.gpu
def test_rows_may_start_beyond_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    memory = torch.zeros((1 << 31) + 200, dtype=torch.bfloat16, device="cuda")
    gate_up = memory.as_strided((3, 200), (1 << 30, 1))
    gate_up.copy_(gate_and_up((3, 100), torch.bfloat16))
    check(silu_and_mul(gate_up), gate_up)
