"""The GEMM of FP8 activations and weights: the formula, that a row has the same bits in every
batch, and which of cuBLASLt's GEMMs serve which operands. Under Triton's interpreter in a
subprocess, and on a CUDA device (`-m gpu`) with the shapes of models."""

import re
from dataclasses import dataclass
from typing import Any, cast

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
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm.cublas_lt import CublasLt, Plan, Scaling, Sizes, shared_library
from tllm_spec.kernels.gemm.fp8_gemms import Fp8Gemms, tile_scales
from tllm_spec.kernels.gemm.fp8_linear import (
    NUM_COUNTERS,
    fp8_linear,
    fp8_swiglu,
    launch_fp8_linear,
    tiling_of,
)
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK, FUSED_ROWS, quantise_rows
from tllm_spec.kernels.gemm.norms import silu_and_mul

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Inputs and outputs: less than a block; an incomplete block; several chunks, the last incomplete.
SHAPES = [(64, 48), (200, 257), (2120, 70)]
# Whether 128 inputs of a row share a scale, of activations and of the weight; otherwise all do.
BLOCKS = [(False, False), (False, True), (True, True), (True, False)]
on_each_scaling = pytest.mark.parametrize("in_blocks", BLOCKS, ids=str)
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

    def run(self, rows: slice = slice(None), operation: Any = fp8_linear, **options: Any) -> Any:
        return operation(
            self.codes[rows], self.code_scales[:, rows].contiguous(), self.weight, self.scales,
            self.bias.dtype, **options,
        )  # fmt: skip


def problem(
    num_rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    in_blocks: tuple[bool, bool] = (False, True),
) -> Problem:
    generator = torch.Generator(device).manual_seed(7)
    inputs, outputs = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    exponents = torch.arange(num_rows, device=device) % 9 - 8
    x = normal(num_rows, inputs) * exponents.exp2()[:, None]
    x *= (torch.arange(inputs, device=device) // BLOCK % 5).exp2()
    codes, code_scales = quantise_rows(x, in_blocks=in_blocks[0])
    return Problem(
        codes,
        code_scales,
        normal(outputs, inputs).to(FP8),
        normal(-(-inputs // BLOCK) if in_blocks[1] else 1, outputs).exp().t(),
        normal(outputs).to(dtype),
        normal(num_rows, outputs).to(dtype),
    )


def formula(p: Problem, *, magnitudes: bool = False) -> torch.Tensor:
    """In float64; of all numbers' magnitudes."""
    inputs = p.weight.shape[1]
    blocks = (
        p.scales.expand(-1, -(-inputs // BLOCK)),
        p.code_scales.t().expand(-1, -(-inputs // BLOCK)),
    )
    of_weight, of_x = (each.double().repeat_interleave(BLOCK, 1)[:, :inputs] for each in blocks)
    weight, x = p.weight.double() * of_weight, p.codes.double() * of_x
    return x.abs() @ weight.abs().t() if magnitudes else x @ weight.t()


def check(
    output: torch.Tensor,
    p: Problem,
    bias: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    *,
    sum_error: float = SUM_ERROR,
) -> None:
    """total: what the rounded result was added to, and the sum rounded."""
    expected, sums = formula(p), formula(p, magnitudes=True)
    if bias is not None:
        expected, sums = expected + bias.double(), sums + bias.double().abs()
    bound = ROUNDING[p.bias.dtype] * expected.abs() + sum_error * sums
    if total is not None:
        expected = expected + total.double()
        bound += ROUNDING[p.bias.dtype] * (expected.abs() + bound)
    assert output.dtype == p.bias.dtype and output.shape == expected.shape
    assert ((output.double() - expected).abs() <= bound).all()


@only_outside_the_interpreter
@on_each_scaling
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, DTYPES, strict=True)), ids=str)
def test_the_reference_equals_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, in_blocks: tuple[bool, bool]
) -> None:
    p = problem(3, shape, dtype, "cpu", in_blocks)
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


@on_each_kernel_device
@pytest.mark.parametrize(
    ("shape", "dtype", "in_blocks"),
    list(zip((*SHAPES, SHAPES[1]), (*DTYPES, torch.bfloat16), BLOCKS, strict=True)),
    ids=str,
)
def test_the_kernel_equals_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, in_blocks: tuple[bool, bool], device: str
) -> None:
    assert has_kernels(torch.device(device))
    for num_rows in (1, 70):
        p = problem(num_rows, shape, dtype, device, in_blocks)
        check(p.run(bias=p.bias), p, p.bias)
    total = p.total.clone()
    assert p.run(bias=p.bias, add_to=total) is total
    check(total, p, p.bias, p.total)
    assert p.run(slice(0, 0)).shape == (0, shape[1])


@on_each_kernel_device
@pytest.mark.parametrize(
    ("shape", "dtype", "in_blocks"),
    list(zip(SHAPES, DTYPES, (BLOCKS[2], BLOCKS[1], BLOCKS[0]), strict=True)),
    ids=str,
)
def test_spreading_chunks_over_programs_changes_no_bit(
    shape: tuple[int, int], dtype: torch.dtype, in_blocks: tuple[bool, bool], device: str
) -> None:
    for num_rows in (1, 20):
        p = problem(num_rows, shape, dtype, device, in_blocks)
        found = [p.total.clone(), p.total.clone()]
        for total, spreads in zip(found, (False, True), strict=True):
            launch_fp8_linear(
                p.codes, p.code_scales, p.weight, p.scales, p.bias, total,
                tiling_of(num_rows, in_blocks[0]),
                spreads=spreads, adds=True,
            )  # fmt: skip
        assert torch.equal(*found)


def counters_on(device: str) -> torch.Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@on_each_kernel_device
def test_the_last_program_of_a_tile_adds_the_chunks_and_leaves_its_counter_zero(
    device: str,
) -> None:
    p, counters = problem(5, (2120, 70), torch.float32, device), counters_on(device)
    expected = p.run(bias=p.bias)
    for _ in range(2):
        assert torch.equal(p.run(bias=p.bias, counters=counters), expected)
        assert not counters.any()


@on_each_kernel_device
@pytest.mark.parametrize(
    ("shape", "dtype", "in_blocks"),
    list(zip(SHAPES[::-1], DTYPES, (BLOCKS[0], BLOCKS[2], BLOCKS[1]), strict=True)),
    ids=str,
)
def test_swiglu_in_the_gemm_changes_no_bit_and_finds_the_largest_magnitudes(
    shape: tuple[int, int], dtype: torch.dtype, in_blocks: tuple[bool, bool], device: str
) -> None:
    """With incomplete tiles, and with chunks that have programs."""
    counters = counters_on(device)
    for num_rows in (1, 9):
        p = problem(num_rows, (shape[0], shape[1] // 2 * 2), dtype, device, in_blocks)
        for bias in (p.bias, None):
            activated, magnitudes = p.run(operation=fp8_swiglu, bias=bias, counters=counters)
            expected = silu_and_mul(p.run(bias=bias))
            assert torch.equal(activated, expected)
            assert torch.equal(magnitudes.amax(1), expected.float().abs().amax(1))
    none, _ = p.run(slice(0, 0), fp8_swiglu, counters=counters)
    assert none.shape == (0, shape[1] // 2)


@on_each_kernel_device
def test_a_row_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    p = problem(70, (1100, 70), torch.float32, device)
    expected = p.run(bias=p.bias)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows])


@pytest.mark.thinned
@only_with_the_compiler
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "is_fused"),
    [
        (1, False),
        (1, True),
        *(pytest.param(number, False, marks=pytest.mark.slow) for number in (17, 64, 512, 4096)),
    ],
)
def test_every_tiling_fits_hopper_and_runs_on_fp8_tensor_cores(
    num_rows: int, is_fused: bool, in_blocks: bool
) -> None:
    """is_fused: with SwiGLU, and with chunks that the last program adds."""
    from tllm_spec.kernels.gemm.fp8_linear import fp8_linear_kernel

    tiling = tiling_of(num_rows, in_blocks)
    constants: dict[str, Any] = {"IN": 4096, "OUT": 4096, "ADDS": not is_fused}
    constants |= {
        "WIDEN": False,
        "ADDED": BLOCK,
        "CHUNK": 1024,
        "PDL": True,
        "bias": None,
        "BLOCK": BLOCK,
    }
    constants |= {"BLOCK_ROWS": tiling.rows, "BLOCK_OUT": tiling.outputs, "FETCHED": 4}
    constants |= {"X_BLOCKS": in_blocks, "W_BLOCKS": in_blocks}
    types = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "scales": "*fp32", "output": "*bf16"}
    types["x_scales"] = "*fp32"
    if is_fused:
        types |= {"magnitudes": "*fp32", "parts": "*fp32", "counters": "*i32"}
    else:
        constants |= dict.fromkeys(("magnitudes", "parts", "counters"))
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    strides = ("scales_block_stride", "output_stride")
    code = compiled_for_hopper(fp8_linear_kernel, types, constants, strides, **options)
    ptx = code.asm["ptx"]
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)\.f32\.(\w+)\.(\w+)", ptx))
    assert found == {(f"m64n{tiling.rows}k32", "e4m3", "e4m3")} and "mma.sync" not in ptx
    assert code.metadata.shared <= 227 << 10 and ".local" not in ptx
    # Each block's product starts at 0, and is added to the float32 sum outside the tensor cores.
    assert ("fma.rn.f32" if in_blocks else "add.f32") in ptx
    # The counter orders the sums that programs write before and read after it.
    assert ("atom.global.gpu.acq_rel.add" in ptx) == is_fused


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [(4096, 6144), (14336, 4096), (200, 257)], ids=str)
@pytest.mark.parametrize("in_blocks", [BLOCKS[0], BLOCKS[2]], ids=str)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    shape: tuple[int, int], in_blocks: tuple[bool, bool]
) -> None:
    p = problem(4096, shape, torch.bfloat16, "cuda", in_blocks)
    expected = p.run(bias=p.bias)
    check(expected, p, p.bias)
    for number in (*range(1, 140), 200, 257, 300, 1024):
        first = 37 * number % (4096 - number)  # other positions in other tiles
        rows = slice(first, first + number)
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 28672), (14336, 4096), (2120, 70)], ids=str)
@pytest.mark.parametrize("in_blocks", [BLOCKS[0], BLOCKS[2]], ids=str)
def test_few_rows_whose_gemms_do_more_have_the_bits_of_many(
    shape: tuple[int, int], in_blocks: tuple[bool, bool]
) -> None:
    p, counters = problem(1000, shape, torch.bfloat16, "cuda", in_blocks), counters_on("cuda")
    expected, total = p.run(bias=p.bias), p.total.clone()
    p.run(add_to=total)
    for number in (*range(1, FUSED_ROWS + 1), 1):
        rows = slice(37 * number, 38 * number)
        assert torch.equal(p.run(rows, bias=p.bias, counters=counters), expected[rows]), number
        added = p.total[rows].clone()
        assert torch.equal(p.run(rows, add_to=added, counters=counters), total[rows]), number
        activated, magnitudes = p.run(rows, fp8_swiglu, bias=p.bias, counters=counters)
        assert torch.equal(activated, silu_and_mul(expected[rows])), number
        assert torch.equal(magnitudes.amax(1), activated.float().abs().amax(1)), number


OF_ROWS, MIXED, OF_BLOCKS = BLOCKS[:3]


class FakePlan:
    """It computes with the reference, as the library would on operands of these sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def run(
        self,
        algorithm: bytes,
        codes: torch.Tensor,
        weight: torch.Tensor,
        output: Any,
        *,
        bias: torch.Tensor | None,
        scales: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        of_weight, of_x = scales
        if self.sizes.scaling is Scaling.TILES:
            of_weight = of_weight.repeat_interleave(128, 0)[:, : len(of_x)]
        rows = self.sizes.rows
        in_memory = torch.full((rows, codes.shape[1]), 3.0).to(codes.dtype)
        in_memory[: len(codes)] = codes
        of_all = torch.ones(len(of_x), rows)
        of_all[:, : len(codes)] = of_x
        own = {"add_to": output} if self.sizes.adds else {}
        found = fp8_linear.reference(
            in_memory, of_all, weight, of_weight, output.dtype, bias, **own
        )
        output.copy_(found)


class FakeGemms(Fp8Gemms):
    def __init__(self) -> None:
        super().__init__(cast(CublasLt, None))
        object.__setattr__(self, "used", [])

    def _plan(self, output: torch.Tensor, inputs: int, *forms: Any) -> Any:
        sizes = Sizes(*output.shape[:1], inputs, output.shape[1], inputs, 0, output.dtype, *forms)
        self.used.append((sizes.scaling, sizes.rows))  # type: ignore[attr-defined]  # of the fake
        return cast(Plan, FakePlan(sizes)), b""


def run(p: Problem, gemms: Fp8Gemms, tiles: torch.Tensor | None = None) -> bool:
    """With bias and without, added to what was there. Checks what the library serves."""
    operands = p.codes, p.code_scales, p.weight, p.scales, tiles
    output, total = torch.empty_like(p.total), p.total.clone()
    if not gemms.run(*operands, p.bias, output, adds=False):
        return False
    check(output, p, p.bias)
    assert gemms.run(*operands, None, total, adds=True)
    check(total, p, None, p.total)
    return True


@pytest.mark.parametrize(
    ("rows", "in_blocks", "used"),
    [
        (128, OF_ROWS, None),
        (129, OF_ROWS, (Scaling.ROWS, 129)),
        (16, OF_BLOCKS, None),
        (17, OF_BLOCKS, (Scaling.BLOCKS, 20)),
        (129, MIXED, None),
    ],
)
def test_rows_run_the_library_where_it_is_faster_and_blocks_a_multiple_of_4_of_them(
    rows: int, in_blocks: tuple[bool, bool], used: tuple[Scaling, int] | None
) -> None:
    gemms = FakeGemms()
    p = problem(rows, (256, 48), torch.bfloat16, "cpu", in_blocks)
    assert run(p, gemms) == (used is not None)
    assert gemms.used == ([] if used is None else [used] * 2)


def of_tiles(p: Problem) -> Problem:
    """With one scale for 128 x 128 weights."""
    scales = p.scales[::128].repeat_interleave(128, 0).t().contiguous().t()
    return Problem(p.codes, p.code_scales, p.weight, scales, p.bias, p.total)


def test_many_outputs_use_scales_of_tiles_where_all_rows_of_a_tile_have_one() -> None:
    p = problem(66, (384, 16384), torch.bfloat16, "cpu", OF_BLOCKS)
    assert tile_scales(p.scales) is None and tile_scales(p.scales[:100]) is None
    p, gemms = of_tiles(p), FakeGemms()
    tiles = tile_scales(p.scales)
    assert (
        tiles is not None
        and tiles.shape == (128, 4)
        and torch.equal(tiles[:, 0], p.scales[::128, 0])
    )
    assert run(p, gemms, tiles) and gemms.used == [(Scaling.TILES, 68)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 33, 130, 1025])
@pytest.mark.parametrize("in_blocks", [OF_ROWS, OF_BLOCKS], ids=str)
def test_the_librarys_gemms_equal_the_formula(rows: int, in_blocks: tuple[bool, bool]) -> None:
    library = shared_library()
    assert library is not None
    gemms = Fp8Gemms(CublasLt(library, torch.device("cuda")))
    p = problem(rows, (1024, 2048), torch.bfloat16, "cuda", in_blocks)
    assert run(p, gemms) == (in_blocks == OF_BLOCKS or rows > 128)
    if in_blocks == OF_BLOCKS:
        p = of_tiles(p)
        assert run(p, gemms, tile_scales(p.scales))
