"""Norms and gated activations: the kernels against their references, and both against the formulas
in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda_graphs import captured_graph, copy_all
from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
    stored,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.norms import Activation, rms_norm, silu_and_mul

EPS = 1e-5
SHAPES = [(1, 4096), (3, 192), (5, 100), (2, 1), (7, 5120), (0, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(
    shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight; rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 1, shape[0])[:, None]
    x = (torch.randn(*shape, generator=generator) * sizes).to(device, dtype)
    weight = torch.rand(shape[1], generator=generator) + 0.5
    return x, weight.to(device, dtype)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula in float64."""
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def check(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    assert output.dtype == x.dtype
    # One rounding of the result, plus the error of the float32 arithmetic before it.
    torch.testing.assert_close(
        output.double(), expected(x, weight), rtol=ROUNDING[x.dtype] + 6e-7, atol=1e-7
    )


@on_each_shape
@on_each_dtype
def test_the_reference_equals_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = arguments(shape, dtype)
    check(rms_norm.reference(x, weight, EPS), x, weight)


@on_each_kernel_device
@on_each_shape
@on_each_dtype
def test_the_kernel_equals_the_formula_and_its_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    x, weight = arguments(shape, dtype, device)
    before = x.clone()
    output = rms_norm(x, weight, EPS)
    assert torch.equal(x, before)
    check(output, x, weight)
    check_like_the_reference(output, rms_norm.reference(x, weight, EPS))


@on_each_kernel_device
@on_each_dtype
def test_a_weight_in_float32_is_not_rounded(dtype: torch.dtype, device: str) -> None:
    x, _ = arguments((5, 100), dtype, device)
    weight = arguments((5, 100), torch.float32, device)[1]
    output = rms_norm(x, weight, EPS)
    check(output, x, weight)
    reference = rms_norm.reference(x, weight, EPS)
    assert reference.dtype == dtype
    check_like_the_reference(output, reference)


@on_each_kernel_device
@on_each_dtype
def test_the_rounded_norm_is_added_in_place(dtype: torch.dtype, device: str) -> None:
    x, weight = arguments((5, 100), dtype, device)
    wide = arguments((5, 300), dtype, device, seed=1)[0]
    total, before = wide[:, 100:200], wide.clone()
    normed = rms_norm(x, weight, EPS)
    wanted = stored(before[:, 100:200].float() + normed.float(), dtype)
    assert rms_norm(x, weight, EPS, total) is total
    # In float32 a GPU multiplies by the weight and adds with one rounding.
    tolerance = 1e-6 if dtype == torch.float32 else 0
    torch.testing.assert_close(total, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, :100], before[:, :100])
    assert torch.equal(wide[:, 200:], before[:, 200:])
    reference = before[:, 100:200].clone()
    rms_norm.reference(x, weight, EPS, reference)
    torch.testing.assert_close(total, reference, rtol=2 * ROUNDING[dtype], atol=4e-2)


@on_each_kernel_device
@pytest.mark.parametrize("size", [192, 4096, 1000])
@on_each_dtype
def test_the_kernel_equals_torch_bit_for_bit_if_the_sum_of_squares_is_exact(
    dtype: torch.dtype, size: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(size)
    # Integers with a sum of squares below 2**24.
    x = torch.randint(-40, 41, (4, size), generator=generator).to(device, dtype)
    _, weight = arguments((4, size), dtype, device)
    wanted = F.rms_norm(x, (size,), weight, EPS)
    if INTERPRETED:
        wanted = stored(F.rms_norm(x.float(), (size,), weight.float(), EPS), dtype)
    assert torch.equal(rms_norm(x, weight, EPS), wanted)


@on_each_kernel_device
@on_each_dtype
def test_rows_may_be_views(dtype: torch.dtype, device: str) -> None:
    x, weight = arguments((5, 3 * 192), dtype, device)
    columns = slice(192, 384)
    check(rms_norm(x[::2, columns], weight[columns], EPS), x[::2, columns], weight[columns])


@on_each_kernel_device
def test_a_nan_stays_in_its_row_and_zeros_stay_zeros(device: str) -> None:
    x, weight = arguments((4, 192), torch.bfloat16, device)
    x[1, 7] = torch.nan
    x[2] = 0
    output = rms_norm(x, weight, EPS)
    assert output.isnan().any(-1).tolist() == [False, True, False, False]
    assert output[2].count_nonzero() == 0


@on_each_kernel_device
def test_epsilon_is_used(device: str) -> None:
    x, weight = arguments((1, 64), torch.float32, device)
    large = rms_norm(x, weight, 3.0)
    torch.testing.assert_close(large, rms_norm.reference(x, weight, 3.0))
    assert (large - rms_norm(x, weight, EPS)).abs().max() > 0.1 * large.abs().max()


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference() -> None:
    x, weight = arguments((3, 192), torch.float32)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm.reference(x, weight, EPS))


@pytest.mark.gpu
@on_each_dtype
def test_a_captured_graph_reads_its_inputs_at_replay(dtype: torch.dtype) -> None:
    static = arguments((6, 4096), dtype, "cuda")
    graph, output = captured_graph(lambda: rms_norm(*static, EPS))
    for seed in (1, 2):
        copy_all(static, arguments((6, 4096), dtype, seed=seed))
        graph.replay()
        check(output, *static)


@pytest.mark.gpu
def test_rows_may_start_beyond_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    x = torch.zeros((1 << 31) + 192, dtype=torch.bfloat16, device="cuda").as_strided(
        (3, 192), (1 << 30, 1)
    )
    start, weight = arguments((3, 192), torch.bfloat16, "cuda")
    x.copy_(start)
    check(rms_norm(x, weight, EPS), start, weight)


ACTIVATIONS_SHAPES = [(1, 14336), (3, 192), (5, 100), (2, 1), (4, 1025), (0, 64)]
# Absolute tolerance; float16 results may be denormal.
SMALLEST = {torch.float32: 1e-30, torch.float16: 6e-8, torch.bfloat16: 1e-30}
activations_on_each_shape = pytest.mark.parametrize("shape", ACTIVATIONS_SHAPES, ids=str)
# With the absolute error by gate times up: torch's sum in GELU cancels for gates below 0.
ACTIVATIONS = {"silu": 0.0, "gelu_pytorch_tanh": 2.0**-23}
on_each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def gate_and_up(
    shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    """`[T, 2 * I]`; gates of about -12 to 12."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape[0], 2 * shape[1], generator=generator) * 4).to(device, dtype)


def activations_expected(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    tanh = (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()
    return gate * (1 + tanh) / 2 * up


def activations_check(
    output: torch.Tensor, gate_up: torch.Tensor, activation: Activation = "silu"
) -> None:
    dtype, (gate, up) = gate_up.dtype, gate_up.double().chunk(2, -1)
    assert output.dtype == dtype and output.is_contiguous()
    # One rounding of the result, plus the error of the exponential and the division.
    wanted = activations_expected(gate_up, activation)
    most = (ROUNDING[dtype] + 2e-6) * wanted.abs() + SMALLEST[dtype]
    most += ACTIVATIONS[activation] * (gate * up).abs()
    assert ((output.double() - wanted).abs() <= most).all()


@on_each_activation
@activations_on_each_shape
@on_each_dtype
def test_the_reference_equals_the_formula_of_activations(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation
) -> None:
    gate_up = gate_and_up(shape, dtype)
    activations_check(silu_and_mul.reference(gate_up, activation), gate_up, activation)


@on_each_kernel_device
@on_each_activation
@activations_on_each_shape
@on_each_dtype
def test_the_kernel_equals_the_formula_and_its_reference_of_activations(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation, device: str
) -> None:
    assert has_kernels(torch.device(device))
    gate_up = gate_and_up(shape, dtype, device)
    before = gate_up.clone()
    output = silu_and_mul(gate_up, activation)
    activations_check(output, gate_up, activation)
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
    activations_check(silu_and_mul(view), view)


@only_outside_the_interpreter
def test_a_tensor_on_the_cpu_runs_the_reference_of_activations() -> None:
    gate_up = gate_and_up((3, 100), torch.bfloat16)
    assert torch.equal(silu_and_mul(gate_up), silu_and_mul.reference(gate_up))


@pytest.mark.gpu
@on_each_dtype
def test_a_captured_graph_reads_its_input_at_replay(dtype: torch.dtype) -> None:
    static = gate_and_up((6, 14336), dtype, "cuda")
    graph, output = captured_graph(lambda: silu_and_mul(static))
    for seed in (1, 2):
        static.copy_(gate_and_up((6, 14336), dtype, seed=seed))
        graph.replay()
        activations_check(output, static)


@pytest.mark.gpu
def test_rows_may_start_beyond_2_to_the_31_elements_of_activations() -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    memory = torch.zeros((1 << 31) + 200, dtype=torch.bfloat16, device="cuda")
    gate_up = memory.as_strided((3, 200), (1 << 30, 1))
    gate_up.copy_(gate_and_up((3, 100), torch.bfloat16))
    activations_check(silu_and_mul(gate_up), gate_up)
