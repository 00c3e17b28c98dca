"""The GEMM of FP8 activations and weights: the formula, and that a row has the same bits in every
batch. Under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`) with the shapes
of models."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import (
    INTERPRETED,
    ROUNDING,
    on_each_kernel_device,
    only_outside_the_interpreter,
    only_with_the_compiler,
)
from tllm_spec.kernels.fp8_linear import fp8_linear
from tllm_spec.kernels.quantise_rows import quantise_rows
from tllm_spec.kernels.scaled_linear import BLOCK, launch_scaled_linear, tiling_of
from tllm_spec.kernels.triton_support import has_kernels

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Inputs and outputs: less than a block; an incomplete block; several chunks, the last incomplete.
SHAPES = [(64, 48), (200, 257), (2120, 70)]
# Of float32 sums, and of a block on Hopper's FP8 tensor cores, by the sum of magnitudes.
SUM_ERROR = 4e-6 if INTERPRETED else 2.0**-12


@dataclass(frozen=True)
class Problem:
    codes: torch.Tensor
    code_scales: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor
    total: torch.Tensor

    def run(self, rows: slice = slice(None), **options: Any) -> torch.Tensor:
        return fp8_linear(
            self.codes[rows], self.code_scales[rows], self.weight, self.scales, self.bias.dtype,
            **options,
        )  # fmt: skip


def problem(num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> Problem:
    generator = torch.Generator(device).manual_seed(7)
    inputs, outputs = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    exponents = torch.arange(num_rows, device=device) % 9 - 8
    codes, code_scales = quantise_rows(normal(num_rows, inputs) * exponents.exp2()[:, None])
    return Problem(
        codes,
        code_scales,
        normal(outputs, inputs).to(FP8),
        normal(outputs, -(-inputs // BLOCK)).exp(),
        normal(outputs).to(dtype),
        normal(num_rows, outputs).to(dtype),
    )


def formula(p: Problem, *, magnitudes: bool = False) -> torch.Tensor:
    """In float64; of all numbers' magnitudes."""
    scales = p.scales.double().repeat_interleave(BLOCK, 1)[:, : p.weight.shape[1]]
    weight = p.weight.double() * scales
    x = p.codes.double() * p.code_scales.double()[:, None]
    return x.abs() @ weight.abs().t() if magnitudes else x @ weight.t()


def check(
    output: torch.Tensor, p: Problem, *added: torch.Tensor, sum_error: float = SUM_ERROR
) -> None:
    expected, sums = formula(p), formula(p, magnitudes=True)
    for other in added:
        expected, sums = expected + other.double(), sums + other.double().abs()
    bound = ROUNDING[p.bias.dtype] * expected.abs() + sum_error * sums
    assert output.dtype == p.bias.dtype and output.shape == expected.shape
    assert ((output.double() - expected).abs() <= bound).all()


@only_outside_the_interpreter
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_equals_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    p = problem(3, shape, dtype, "cpu")
    check(p.run(), p, sum_error=1e-12)
    total = p.total.clone()
    assert p.run(bias=p.bias, add_to=total) is total
    check(total, p, p.bias, p.total, sum_error=1e-12)


@only_outside_the_interpreter
def test_a_row_of_the_reference_has_the_same_bits_in_every_batch() -> None:
    p = problem(1024, (1100, 70), torch.float32, "cpu")
    expected = p.run(bias=p.bias)
    for number in (1, 8, 9, 256):
        rows = slice(1024 - number, 1024)
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows])


@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_rows in (1, 70):
        p = problem(num_rows, shape, dtype, device)
        check(p.run(bias=p.bias), p, p.bias)
    total = p.total.clone()
    assert p.run(bias=p.bias, add_to=total) is total
    check(total, p, p.bias, p.total)
    assert p.run(slice(0, 0)).shape == (0, shape[1])


@on_each_kernel_device
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, DTYPES, strict=True)), ids=str)
def test_spreading_chunks_over_programs_changes_no_bit(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    for num_rows in (1, 20):
        p = problem(num_rows, shape, dtype, device)
        found = [p.total.clone(), p.total.clone()]
        for total, spreads in zip(found, (False, True), strict=True):
            launch_scaled_linear(
                p.codes, p.weight, p.scales, p.bias, total, tiling_of(num_rows, dtype),
                spreads=spreads, adds=True, x_scales=p.code_scales,
            )  # fmt: skip
        assert torch.equal(*found)


@on_each_kernel_device
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str, exact_dots: None) -> None:
    p = problem(70, (1100, 70), torch.float32, device)
    expected = p.run(bias=p.bias)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows])


@only_with_the_compiler
@pytest.mark.parametrize(
    "num_rows", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (17, 64, 4096))]
)
def test_every_tiling_fits_hopper_and_runs_on_fp8_tensor_cores(num_rows: int) -> None:
    from tllm_spec.kernels.scaled_linear_triton import scaled_linear_kernel

    tiling = tiling_of(num_rows, FP8)
    constants: dict[str, Any] = {"IN": 4096, "OUT": 4096, "SPREADS": False, "ADDS": True}
    constants |= {"WIDEN": False, "CHUNK": 1024, "PDL": True, "bias": None, "BLOCK": BLOCK}
    constants |= {"GROUP": 0, "BLOCK_ROWS": tiling.rows, "BLOCK_OUT": tiling.outputs}
    types = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "scales": "*fp32", "output": "*bf16"}
    types["x_scales"] = "*fp32"
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    strides = ("x_stride", "output_stride")
    code = compiled_for_hopper(scaled_linear_kernel, types, constants, strides, **options)
    ptx = code.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)\.f32\.(\w+)\.(\w+)", ptx))
    assert found == {(f"m64n{tiling.rows}k32", "e4m3", "e4m3")} and "mma.sync" not in ptx
    assert code.metadata.shared <= 227 << 10 and ".local" not in ptx
    # Each block's product starts at 0, and is added to the float32 sum outside the tensor cores.
    assert "fma.rn.f32" in ptx


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [(4096, 6144), (14336, 4096), (200, 257)], ids=str)
def test_the_number_of_rows_changes_no_bit_of_a_row(shape: tuple[int, int]) -> None:
    p = problem(4096, shape, torch.bfloat16, "cuda")
    expected = p.run(bias=p.bias)
    check(expected, p, p.bias)
    for number in (*range(1, 140), 200, 257, 300, 1024):
        first = 37 * number % (4096 - number)  # other positions in other tiles
        rows = slice(first, first + number)
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows]), number
