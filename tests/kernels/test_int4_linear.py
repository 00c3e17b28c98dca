"""The GEMM with 4-bit weights: the formula, that every weight has its own scale and zero point, and
that a row has the same bits in every batch. Under Triton's interpreter in a subprocess, and on a
CUDA device (`-m gpu`) with the shapes of models."""

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
    only_with_the_compiler,
)
from tllm_spec.kernels.batch_invariant_linear import Tiling
from tllm_spec.kernels.int4_linear import (
    half_of,
    int4_dequantised,
    int4_linear,
    int4_tiling_of,
    launch_int4_linear,
    packed,
    unpacked,
)
from tllm_spec.kernels.triton_support import has_kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GROUPS = (0, 32, 64, 128)
on_each_group = pytest.mark.parametrize("group", GROUPS)
# Inputs and outputs: an incomplete block; a chunk; several, the last block incomplete.
SHAPES = [(96, 48), (1024, 33), (2144, 70)]
SUM_ERROR = 4e-6


@dataclass(frozen=True)
class Problem:
    """x has a stride between its rows."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    bias: torch.Tensor
    total: torch.Tensor

    @property
    def weight(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return packed(self.codes, self.group), self.scales, self.zeros, self.group


def problem(
    num_rows: int, shape: tuple[int, int], group: int, dtype: torch.dtype, device: str
) -> Problem:
    generator = torch.Generator(device).manual_seed(num_rows)
    inputs, outputs = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 16, size, generator=generator, device=device, dtype=torch.uint8)

    groups = -(-inputs // (group or inputs))
    return Problem(
        normal(num_rows, inputs + 8).to(dtype)[:, :inputs],
        codes(outputs, inputs),
        normal(outputs, groups).half().float(),
        codes(outputs, groups).float(),
        group,
        normal(outputs).to(dtype),
        normal(num_rows, outputs).to(dtype),
    )


def numbers(p: Problem, dtype: torch.dtype) -> torch.Tensor:
    """The weight, one column after the other. The interpreter truncates to bfloat16."""
    columns = []
    for k in range(p.codes.shape[1]):
        g = k // p.group if p.group else 0
        columns.append((p.codes[:, k].float() - p.zeros[:, g]) * p.scales[:, g])
    weight = torch.stack(columns, 1)
    if INTERPRETED and dtype == torch.bfloat16:
        return (weight.view(torch.int32) & -0x10000).view(torch.float32).double()
    return weight.to(dtype).double()


def check(
    output: torch.Tensor, p: Problem, *added: torch.Tensor, weight: torch.Tensor | None = None
) -> None:
    """Rounded once."""
    weight = numbers(p, p.x.dtype) if weight is None else weight
    expected = p.x.double() @ weight.t()
    magnitudes = p.x.double().abs() @ weight.abs().t()
    for other in added:
        expected, magnitudes = expected + other.double(), magnitudes + other.abs()
    bound = ROUNDING[p.x.dtype] * expected.abs() + SUM_ERROR * magnitudes
    assert output.dtype == p.x.dtype and output.shape == expected.shape
    assert ((output.double() - expected).abs() <= bound).all()


@on_each_dtype
@on_each_group
def test_the_reference_equals_the_formula(group: int, dtype: torch.dtype) -> None:
    p = problem(3, SHAPES[0], group, dtype, "cpu")
    weight = int4_dequantised(p.codes, p.scales, p.zeros, group, dtype)
    if not INTERPRETED:
        assert torch.equal(weight.double(), numbers(p, dtype))
    check(int4_linear.reference(p.x, *p.weight), p, weight=weight.double())
    total = p.total.clone()
    assert int4_linear.reference(p.x, *p.weight, p.bias, add_to=total) is total
    check(total, p, p.bias, p.total, weight=weight.double())


@on_each_group
def test_packing_keeps_every_code_in_half_a_byte(group: int) -> None:
    for inputs in (64, 96, 128, 200, 256):
        codes = torch.arange(3 * inputs).mul(7).remainder(16).to(torch.uint8).view(3, inputs)
        stored = packed(codes, group)
        half = half_of(group)
        assert stored.shape == (3, -(-inputs // (2 * half)) * half)
        assert torch.equal(unpacked(stored, inputs, group), codes)


@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@on_each_group
def test_the_kernel_equals_the_formula(group: int, dtype: torch.dtype, device: str) -> None:
    assert has_kernels(torch.device(device))
    for num_rows, shape in ((1, SHAPES[2]), (70, SHAPES[0]), (3, SHAPES[1])):
        p = problem(num_rows, shape, group, dtype, device)
        check(int4_linear(p.x, *p.weight, p.bias), p, p.bias)
    assert int4_linear(p.x[:0], *p.weight).shape == (0, shape[1])


@on_each_kernel_device
@on_each_group
def test_every_weight_is_converted_exactly_with_its_scale_and_zero_point(
    group: int, device: str
) -> None:
    """With the identity as x the output is the weight, rounded to the type of x."""
    p = problem(1, (160, 67), group, torch.float16, device)
    x = torch.eye(160, dtype=torch.float16, device=device)
    found = int4_linear(x, *p.weight)
    assert torch.equal(found.t().double(), numbers(p, torch.float16))
    assert set(p.codes.flatten().tolist()) == set(range(16))


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True])
def test_the_output_is_added_in_place_with_one_rounding(spreads: bool, device: str) -> None:
    inputs = 2 * 1024
    x = torch.zeros(2, inputs, dtype=torch.float16, device=device)
    x[:, 0], x[:, -1] = 1, 2.0**-11
    codes = torch.full((5, inputs), 9, dtype=torch.uint8, device=device)
    groups = inputs // 128
    scales = torch.ones(5, groups, device=device)
    zeros = torch.full((5, groups), 8.0, device=device)
    wide = torch.full((2, 8), 2.0**-11, dtype=torch.float16, device=device)
    launch_int4_linear(
        x, packed(codes, 128), scales, zeros, 128, None, wide[:, :5], int4_tiling_of(2, x.dtype),
        spreads=spreads, adds=True,
    )  # fmt: skip
    # 1 + 2^-11 alone would be rounded to 1, and the sum again.
    assert (wide[:, :5] == 1 + 2.0**-10).all() and (wide[:, 5:] == 2.0**-11).all()


@on_each_kernel_device
@pytest.mark.parametrize("group", [0, 32])
def test_spreading_chunks_over_programs_changes_no_bit(group: int, device: str) -> None:
    for num_rows in (1, 20):
        p = problem(num_rows, SHAPES[2], group, torch.float32, device)
        found = [p.total.clone(), p.total.clone()]
        for total, spreads in zip(found, (False, True), strict=True):
            launch_int4_linear(
                p.x, *p.weight, p.bias, total, int4_tiling_of(num_rows, p.x.dtype),
                spreads=spreads, adds=True,
            )  # fmt: skip
        assert torch.equal(*found)
        check(found[0], p, p.bias, p.total)


@on_each_kernel_device
@on_each_dtype
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, device: str, exact_dots: None
) -> None:
    p = problem(70, (1120, 70), 32, dtype, device)
    expected = int4_linear(p.x, *p.weight, p.bias)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(int4_linear(p.x[rows], *p.weight, p.bias), expected[rows])


@only_with_the_compiler
@pytest.mark.parametrize(
    ("num_rows", "group"),
    [
        (1, 128),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((17, 128), (64, 128), (4096, 128), (1, 32), (4096, 0))
        ),
    ],
)
def test_every_tiling_fits_hopper_and_uses_the_same_kind_of_instruction(
    num_rows: int, group: int
) -> None:
    from tllm_spec.kernels.int4_linear_triton import int4_linear_kernel

    tiling = int4_tiling_of(num_rows, torch.bfloat16)
    constants: dict[str, Any] = {"IN": 4096, "OUT": 4096, "SPREADS": False, "ADDS": True}
    constants |= {"WIDEN": False, "CHUNK": 1024, "PDL": True, "bias": None}
    constants |= {"GROUP": group or 4096, "BLOCK_HALF": half_of(group)}
    constants |= {"BLOCK_ROWS": tiling.rows, "BLOCK_OUT": tiling.outputs}
    types = {"x": "*bf16", "weight": "*u8", "scales": "*fp32", "zeros": "*fp32", "output": "*bf16"}
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    strides = ("x_stride", "output_stride")
    code = compiled_for_hopper(int4_linear_kernel, types, constants, strides, **options)
    ptx = code.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx))
    assert found == {f"m64n{tiling.rows}k16"} and "mma.sync" not in ptx
    assert code.metadata.shared <= 227 << 10
    assert "cp.async" in ptx and "cvt.rn.f32" not in ptx  # codes become numbers by addition
    assert "ld.global.b8" not in ptx and "ld.global.b32" not in ptx  # all is in the pipeline


# Inputs and outputs of an 8B Llama's layers.
MODEL_SHAPES = [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [*MODEL_SHAPES, (224, 257)], ids=str)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    shape: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    p = problem(4096, shape, group, dtype, "cuda")
    expected = int4_linear(p.x, *p.weight, p.bias)
    check(expected, p, p.bias)
    numbers = [1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 200, 257, 1024]
    for number in numbers:
        first = 37 * number % (4096 - number)  # other positions in other tiles
        rows = slice(first, first + number)
        found = int4_linear(p.x[rows], *p.weight, p.bias)
        assert torch.equal(found, expected[rows]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
def test_no_tiling_changes_a_bit(dtype: torch.dtype) -> None:
    p = problem(333, (4096, 1000), 128, dtype, "cuda")
    expected = int4_linear(p.x, *p.weight)
    for tiling in (Tiling(16, 64, 4, 4), Tiling(32, 64, 4, 2), Tiling(64, 128, 8, 3)):
        for spreads in (False, True):
            found = torch.empty_like(expected)
            launch_int4_linear(p.x, *p.weight, None, found, tiling, spreads=spreads, adds=False)
            assert torch.equal(found, expected)
