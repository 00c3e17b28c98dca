"""The kernel against its reference, against F.rms_norm bit for bit where sums are exact, and
against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    check_like_the_reference,
    on_each_kernel_device,
    only_outside_the_interpreter,
    stored,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.norms import rms_norm

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
    rms_norm(*static, EPS)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = rms_norm(*static, EPS)
    for seed in (1, 2):
        for mine, new in zip(static, arguments((6, 4096), dtype, seed=seed), strict=True):
            mine.copy_(new)
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
