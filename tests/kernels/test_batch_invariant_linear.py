"""The batch-invariant GEMM: the formula, and that a row has the same bits in every batch.
Under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`) with the shapes of
models."""

from itertools import cycle

import pytest
import torch

from tests.kernels.hopper import HOPPER
from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device, only_with_the_compiler
from tests.kernels.launches import META, launches_of
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.batch_invariant_linear import (
    BLOCK_IN,
    CHUNK,
    Tiling,
    batch_invariant_linear,
    launch_linear,
    tiling_of,
)

TOLERANCE = {torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
on_each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
# Sizes that are not multiples of a block; inputs of one chunk, of several, and with a nearly empty
# last chunk.
SHAPES = [(32, 48), (100, 257), (CHUNK, 64), (CHUNK + 1, 65), (2 * CHUNK + 300, 33)]


def problem(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with a stride between its rows, weight, bias."""
    generator = torch.Generator().manual_seed(num_rows)
    (in_features, out_features), wide = shape, shape[0] + 8
    x = torch.randn(num_rows, wide, generator=generator).to(device, dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
    return x, weight, torch.randn(out_features, generator=generator).to(device, dtype)


def check_formula(
    output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    expected = x.double() @ weight.double().t()
    expected += 0 if bias is None else bias.double()
    tolerance = TOLERANCE[x.dtype]
    assert output.dtype == x.dtype and output.is_contiguous()
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance * x.shape[1] ** 0.5
    )


@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_equals_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = problem(3, shape, dtype, "cpu")
    check_formula(batch_invariant_linear.reference(x, weight, bias).contiguous(), x, weight, bias)
    check_formula(batch_invariant_linear(x, weight).contiguous(), x, weight, None)


@on_each_kernel_device
@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, cycle(TOLERANCE), strict=False)), ids=str
)
def test_the_kernel_equals_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_rows in (1, 17, 70):
        x, weight, bias = problem(num_rows, shape, dtype, device)
        check_formula(batch_invariant_linear(x, weight, bias), x, weight, bias)
    assert batch_invariant_linear(x[:0], weight, bias).shape == (0, shape[1])


@on_each_kernel_device
@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES, cycle(TOLERANCE), strict=False)), ids=str
)
def test_spreading_chunks_over_programs_changes_no_bit(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    for num_rows in (1, 20):
        x, weight, bias = problem(num_rows, shape, dtype, device)
        tiling = tiling_of(num_rows, dtype)
        together, spread = (
            launch_linear(x, weight, bias, tiling, spreads=how) for how in (False, True)
        )
        assert torch.equal(together, spread)


@on_each_kernel_device
@on_each_dtype
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, device: str) -> None:
    x, weight, bias = problem(70, (CHUNK + 72, 70), dtype, device)
    expected = batch_invariant_linear(x, weight, bias)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(batch_invariant_linear(x[rows], weight, bias), expected[rows])


# An 8B Llama's, and the zoo's target's.
MODEL_SHAPES = [(4096, 6144), (4096, 28672), (14336, 4096), (192, 512), (512, 192)]


@only_with_the_compiler
def test_the_compiler_adds_the_bias_after_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it knew that the inputs fit one block, it would start the accumulation with the bias."""

    def call() -> None:
        shapes = ((1, BLOCK_IN // 2), (48, BLOCK_IN // 2), (48,))
        batch_invariant_linear(*(torch.empty(shape, device=META) for shape in shapes))

    (made,) = launches_of(call, HOPPER, monkeypatch)
    code = made.compiled(HOPPER).asm["ttir"]
    assert code.count("tt.dot") == 1 and code.count("arith.addf") == 2


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = problem(4096, shape, dtype, "cuda")
    expected = batch_invariant_linear(x, weight, bias)
    numbers = (
        [*range(1, 301), 1024] if dtype != torch.float32 else [1, 2, 16, 17, 64, 65, 300, 1024]
    )
    for number in numbers:
        first = 37 * number % (4096 - number)  # other positions in other tiles
        found = batch_invariant_linear(x[first : first + number], weight, bias)
        assert torch.equal(found, expected[first : first + number]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
def test_no_tiling_changes_a_bit(dtype: torch.dtype) -> None:
    x, weight, bias = problem(333, (4096, 1000), dtype, "cuda")
    expected = batch_invariant_linear(x, weight, bias)
    for tiling in (
        Tiling(16, 64, 4, 4),
        Tiling(32, 64, 4, 2),
        Tiling(64, 64, 4, 3),
        Tiling(64, 128, 8, 3),
    ):
        assert torch.equal(launch_linear(x, weight, bias, tiling, spreads=False), expected)
