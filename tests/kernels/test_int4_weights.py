"""Weights of 4 bits: how they are stored and dequantised, and `scaled_linear` with them: the
formula, that every weight has its own scale and zero point, and that a row has the same bits in
every batch. Under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`) with the
shapes of models."""

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
    stored,
)
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.batch_invariant_linear import Tiling
from tllm_spec.kernels.gemm.int4_weights import (
    BLOCK,
    E2M1,
    GROUPS,
    HALF,
    MXFP4_GROUP,
    dequantise_int4,
    exponent_words,
    group_words,
    int4_dequantised,
    packed,
    row_bytes,
    scales_of,
    unpacked,
)
from tllm_spec.kernels.gemm.scaled_linear import (
    MAX_KERNEL_ROWS,
    chunk_of_tiles,
    int4_tiling_of,
    launch_scaled_linear,
    scaled_linear,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Inputs that share a word, and whether codes are E2M1 numbers.
FORMS = (*((group, False) for group in GROUPS[1:]), (32, True), (16, True))
on_each_form = pytest.mark.parametrize("form", FORMS, ids=["32", "64", "128", "mxfp4", "nvfp4"])
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
    form: tuple[int, bool]
    bias: torch.Tensor
    total: torch.Tensor

    @property
    def group(self) -> int:
        return self.form[0]

    @property
    def weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        words = group_words(self.scales, self.zeros)
        if self.form[1]:
            words = exponent_words(self.scales) if self.group == MXFP4_GROUP else self.scales
        return packed(self.codes), words

    def run(self, rows: slice = slice(None), **options: Any) -> torch.Tensor:
        return scaled_linear(self.x[rows], *self.weight, self.bias, group=self.group, **options)


def problem(
    num_rows: int, shape: tuple[int, int], form: tuple[int, bool], dtype: torch.dtype, device: str
) -> Problem:
    generator = torch.Generator(device).manual_seed(num_rows)
    (inputs, outputs), (group, is_float) = shape, form

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 16, size, generator=generator, device=device, dtype=torch.uint8)

    groups = -(-inputs // group)
    scales = normal(outputs, groups).half().float()
    if is_float and group == MXFP4_GROUP:
        scales = scales.abs().log2().round().exp2()
    return Problem(
        normal(num_rows, inputs + 8).to(dtype)[:, :inputs],
        codes(outputs, inputs),
        scales,
        codes(outputs, groups).float(),
        form,
        normal(outputs).to(dtype),
        normal(num_rows, outputs).to(dtype),
    )


def numbers(p: Problem) -> torch.Tensor:
    """The weight in float64, one column after the other."""
    columns = []
    for k in range(p.codes.shape[1]):
        g = k // p.group
        if p.form[1]:
            own = torch.tensor(
                [E2M1[code & 7] * (1 - code // 8 * 2) for code in p.codes[:, k].tolist()]
            ).to(p.codes.device, torch.float64)
        else:
            own = p.codes[:, k].double() - p.zeros[:, g]
        columns.append(own * p.scales[:, g])
    return torch.stack(columns, 1)


def check(output: torch.Tensor, p: Problem, *added: torch.Tensor) -> None:
    """Rounded once."""
    weight = numbers(p)
    expected = p.x.double() @ weight.t()
    magnitudes = p.x.double().abs() @ weight.abs().t()
    for other in added:
        expected, magnitudes = expected + other.double(), magnitudes + other.abs()
    bound = ROUNDING[p.x.dtype] * expected.abs() + SUM_ERROR * magnitudes
    assert output.dtype == p.x.dtype and output.shape == expected.shape
    assert ((output.double() - expected).abs() <= bound).all()


def test_packing_keeps_every_code_in_half_a_byte() -> None:
    for inputs in (64, 96, 128, 200, 256):
        codes = torch.arange(3 * inputs).mul(7).remainder(16).to(torch.uint8).view(3, inputs)
        found = packed(codes)
        assert found.shape == (3, row_bytes(inputs)) == (3, -(-inputs // BLOCK) * HALF)
        assert torch.equal(unpacked(found, inputs), codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_word_keeps_every_bit_of_a_16_bit_scale_and_its_zero_point(dtype: torch.dtype) -> None:
    """Also of subnormal scales."""
    scales = torch.arange(1 << 15).to(torch.int16).view(dtype)
    scales = scales[scales.isfinite()].unsqueeze(0)
    zeros = torch.arange(scales.numel()).remainder(16).unsqueeze(0)
    words = group_words(scales, zeros)
    assert torch.equal(scales_of(words), scales.float()) and torch.equal(words & 15, zeros.int())


def test_a_wider_scale_is_rounded_to_20_bits() -> None:
    scales = torch.rand(1, 1000) + 1
    found = scales_of(group_words(scales, torch.full_like(scales, 15)))
    assert ((found - scales).abs() <= 2.0**-20).all()


@on_each_kernel_device
@on_each_dtype
@on_each_form
def test_a_dequantised_weight_is_rounded_once(
    form: tuple[int, bool], dtype: torch.dtype, device: str
) -> None:
    """By the kernel and by the reference. The interpreter truncates to bfloat16."""
    for inputs, outputs in SHAPES:
        p = problem(1, (inputs, outputs), form, dtype, device)
        found = torch.empty(outputs, inputs, dtype=dtype, device=device)
        dequantise_int4(*p.weight, p.group, found)
        expected = numbers(p).float()
        assert torch.equal(found, stored(expected, dtype))
        reference = int4_dequantised(p.codes, p.weight[1], p.group, dtype)
        assert torch.equal(reference, expected.to(dtype))


@on_each_dtype
@on_each_form
def test_the_reference_equals_the_formula(form: tuple[int, bool], dtype: torch.dtype) -> None:
    p = problem(3, SHAPES[0], form, dtype, "cpu")
    check(scaled_linear.reference(p.x, *p.weight, group=p.group), p)
    total = p.total.clone()
    options: dict[str, Any] = {"group": p.group, "add_to": total}
    assert scaled_linear.reference(p.x, *p.weight, p.bias, **options) is total
    check(total, p, p.bias, p.total)


@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@on_each_form
def test_the_kernel_equals_the_formula(
    form: tuple[int, bool], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_rows, shape in ((1, SHAPES[2]), (3, SHAPES[1]), (70, SHAPES[0])):
        p = problem(num_rows, shape, form, dtype, device)
        check(p.run(), p, p.bias)
    check(p.run(invariant=False), p, p.bias)
    assert p.run(slice(0)).shape == (0, shape[1])


@on_each_kernel_device
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@on_each_form
def test_every_weight_is_converted_exactly_with_its_scale_and_zero_point(
    form: tuple[int, bool], dtype: torch.dtype, device: str
) -> None:
    """With the identity as x the output is the weight, rounded to the type of x."""
    p = problem(1, (160, 67), form, dtype, device)
    x = torch.eye(160, dtype=dtype, device=device)
    found = scaled_linear(x, *p.weight, group=p.group)
    assert torch.equal(found.t(), stored(numbers(p).float(), dtype))
    assert set(p.codes.flatten().tolist()) == set(range(16))


@on_each_kernel_device
@pytest.mark.parametrize("adds", [False, True])
def test_many_rows_that_need_not_be_batch_invariant_multiply_slices(
    adds: bool, device: str
) -> None:
    """The weight is rounded to the type of x before it is multiplied."""
    p = problem(MAX_KERNEL_ROWS + 1, (96, 48), (32, False), torch.float16, device)
    total = p.total.clone()
    found = p.run(invariant=False, add_to=total if adds else None)
    expected = p.x.double() @ numbers(p).half().double().t() + p.bias.double()
    expected += p.total.double() * adds
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-10, atol=1e-3)
    assert (found is total) == adds


def test_many_rows_that_need_not_be_batch_invariant_have_as_many_chunks_as_run_at_once() -> None:
    assert chunk_of_tiles(192, 4096) == chunk_of_tiles(896, 4096) == 4096
    assert chunk_of_tiles(128, 14336) == 7168
    assert chunk_of_tiles(1, 2144) == 768  # no chunk is much shorter than MIN_CHUNK


@on_each_kernel_device
@pytest.mark.parametrize("form", FORMS[::2])
def test_spreading_chunks_over_programs_changes_no_bit(form: tuple[int, bool], device: str) -> None:
    for num_rows in (1, 20):
        p = problem(num_rows, SHAPES[2], form, torch.float32, device)
        found = [p.total.clone(), p.total.clone()]
        for total, spreads in zip(found, (False, True), strict=True):
            launch_scaled_linear(
                p.x, *p.weight, p.bias, total, int4_tiling_of(num_rows, 70, p.x.dtype),
                spreads=spreads, adds=True, group=p.group,
            )  # fmt: skip
        assert torch.equal(*found)
        check(found[0], p, p.bias, p.total)


@on_each_kernel_device
@on_each_dtype
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, device: str, exact_dots: None
) -> None:
    p = problem(70, (1120, 70), (32, False), dtype, device)
    expected = p.run()
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(p.run(rows), expected[rows])


@only_with_the_compiler
@pytest.mark.parametrize(
    ("num_rows", "group"),
    [
        (1, 128),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((17, 128), (64, 128), (4096, 128), (1, 32), (4096, 64))
        ),
    ],
)
def test_every_tiling_fits_hopper_and_uses_the_same_kind_of_instruction(
    num_rows: int, group: int
) -> None:
    from tllm_spec.kernels.gemm.scaled_linear import scaled_linear_kernel

    tiling = int4_tiling_of(num_rows, 28672, torch.bfloat16)
    constants: dict[str, Any] = {"IN": 4096, "OUT": 4096, "SPREADS": False, "ADDS": True}
    constants |= {"WIDEN": False, "CHUNK": 1024, "PDL": True, "bias": None}
    constants |= {"GROUP": group, "BLOCK": BLOCK}
    constants |= {"BLOCK_ROWS": tiling.rows, "BLOCK_OUT": tiling.outputs}
    types = {"x": "*bf16", "weight": "*u8", "scales": "*i32", "output": "*bf16"}
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    strides = ("x_stride", "output_stride")
    code = compiled_for_hopper(scaled_linear_kernel, types, constants, strides, **options)
    ptx = code.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx))
    assert found == {f"m64n{tiling.rows}k16"} and "mma.sync" not in ptx
    assert code.metadata.shared <= 227 << 10
    assert "cp.async" in ptx and "fma.rn.bf16x2" in ptx  # two codes become numbers at a time
    assert "ld.global.b8" not in ptx  # all codes are in the pipeline


# Inputs and outputs of an 8B Llama's layers.
MODEL_SHAPES = [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
@pytest.mark.parametrize("form", FORMS[::2] + FORMS[3:])
@pytest.mark.parametrize("shape", [*MODEL_SHAPES, (224, 257)], ids=str)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    shape: tuple[int, int], form: tuple[int, bool], dtype: torch.dtype
) -> None:
    p = problem(4096, shape, form, dtype, "cuda")
    expected = p.run()
    check(expected, p, p.bias)
    counts = [1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 200, 257, 1024]
    for number in counts:
        first = 37 * number % (4096 - number)  # other positions in other tiles
        rows = slice(first, first + number)
        assert torch.equal(p.run(rows), expected[rows]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
def test_no_tiling_changes_a_bit(dtype: torch.dtype) -> None:
    p = problem(333, (4096, 1000), (128, False), dtype, "cuda")
    expected = p.run()
    for tiling in (Tiling(16, 64, 4, 4), Tiling(32, 64, 4, 2), Tiling(64, 128, 8, 3)):
        for spreads in (False, True):
            found = torch.empty_like(expected)
            launch_scaled_linear(
                p.x, *p.weight, p.bias, found, tiling, spreads=spreads, adds=False, group=p.group
            )
            assert torch.equal(found, expected)
