"""The batch-invariant GEMM with weights of the type of x, in FP8 and in 4 bits: the formula, that
every weight has its own scale, that a row has the same bits in every batch, and slices of the
weight for many rows. Under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)
with the shapes of models and in a captured graph."""

import weakref
from dataclasses import replace
from itertools import cycle, product, starmap
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, ROUNDING, on_each_kernel_device
from tests.kernels.linear_problem import FP8, SUM_ERROR, Problem, check, magnitudes_of, problem
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.gemm import scaled_linear as scaled_linear_slices
from tllm_spec.kernels.gemm.batch_invariant_linear import CHUNK, Tiling, batch_invariant_linear
from tllm_spec.kernels.gemm.scaled_linear import (
    BLOCK,
    MAX_BYTES,
    MAX_KERNEL_ROWS,
    MIN_PROGRAMS,
    OUTPUTS,
    chunk_of,
    dequantised,
    launch_scaled_linear,
    multiply_slices,
    scaled_linear,
    slice_outputs,
    tiling_of,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Inputs and outputs: less than a block; an incomplete block; a chunk; several, the last incomplete.
FP8_SHAPES = [(64, 48), (200, 257), (1024, 33), (2120, 70)]
INT4_SHAPES = [(96, 48), (1024, 33), (2144, 70)]
# The last chunk is nearly empty in one of them.
PLAIN_SHAPES = [(32, 48), (100, 257), (CHUNK, 64), (CHUNK + 1, 65), (2 * CHUNK + 300, 33)]
# Of 4 bits the inputs that share a word, or the format of E2M1 numbers.
INT4_FORMS = ("32", "64", "128", "mxfp4", "nvfp4")
CASES = [("fp8", shape) for shape in FP8_SHAPES]
CASES += [("plain", shape) for shape in PLAIN_SHAPES]
CASES += [(form, shape) for form in INT4_FORMS for shape in INT4_SHAPES]
on_each_case = pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
also_interpreted = pytest.mark.interpreted("form", "fp8", "plain")


@pytest.mark.thinned(6)
@on_each_dtype
@on_each_case
def test_the_reference_equals_the_formula(
    form: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    p = problem(3, shape, dtype, "cpu", form)
    if form == "plain":
        check(batch_invariant_linear.reference(p.x, p.weight, p.bias), p, p.bias)
        check(p.run(), p)
        return
    check(scaled_linear.reference(p.x, p.weight, p.scales, group=p.group), p)
    total = p.total.clone()
    options: dict[str, Any] = {"group": p.group, "add_to": total}
    assert scaled_linear.reference(p.x, p.weight, p.scales, p.bias, **options) is total
    check(total, p, p.bias, p.total)


def test_dequantised_weights_may_have_any_number_of_dimensions() -> None:
    p = problem(1, (200, 6), torch.float32, "cpu")
    flat = dequantised(p.weight, p.scales, torch.float32)
    by_hand = [[p.weight[n, k].item() * p.scales[n, k // 128].item() for k in range(200)]
               for n in range(6)]  # fmt: skip
    assert flat.tolist() == by_hand
    stacked = dequantised(p.weight.view(2, 3, 200), p.scales.view(2, 3, 2), torch.bfloat16)
    assert stacked.dtype == torch.bfloat16 and torch.equal(stacked.view(6, 200).float(), flat)


@also_interpreted
@pytest.mark.thinned
@on_each_kernel_device
@on_each_dtype
@on_each_case
def test_the_kernel_equals_the_formula(
    form: str, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    rows_of_4_bits = dict(zip(INT4_SHAPES, (70, 3, 1), strict=True))
    few = {"fp8": (1, 70), "plain": (1, 17, 70)}
    for num_rows in few.get(form) or (rows_of_4_bits[shape],):
        p = problem(num_rows, shape, dtype, device, form)
        check(p.run(bias=p.bias), p, p.bias)
    if form not in few:
        check(p.run(bias=p.bias, invariant=False), p, p.bias)
    assert p.run(slice(0)).shape == (0, shape[1])


@on_each_kernel_device
@on_each_dtype
def test_every_weight_is_converted_exactly_and_has_its_own_scale(
    dtype: torch.dtype, device: str
) -> None:
    """With the identity as x the output is the weight. All 254 finite codes are in each row."""
    inputs = 2 * BLOCK + 20
    codes = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    places = (torch.arange(inputs) + 37 * torch.arange(67)[:, None]) % len(codes)
    weight = codes[places].view(FP8).to(device)
    assert weight.float().max() == 448 and (weight.float().abs() == 2.0**-9).any()
    scales = (torch.arange(67 * 3) * 11 % 7 - 5.0).exp2().view(67, 3).to(device)
    x = torch.eye(inputs, dtype=dtype, device=device)
    for rows in (slice(0, inputs), slice(125, 131)):
        found = scaled_linear(x[rows], weight, scales)
        for output, column in enumerate(found.t()):
            per_input = scales[output].repeat_interleave(BLOCK)[rows]
            assert torch.equal(column.float(), weight[output, rows].float() * per_input)


@on_each_kernel_device
@pytest.mark.parametrize("spreads", [False, True])
def test_the_output_is_added_in_place_with_one_rounding(spreads: bool, device: str) -> None:
    inputs = 2 * 1024
    x = torch.zeros(2, inputs, dtype=torch.float16, device=device)
    x[:, 0], x[:, -1] = 1, 2.0**-9
    weight = torch.zeros(5, inputs, device=device)
    weight[:, 0], weight[:, -1] = 1, 0.25
    scales = torch.ones(5, inputs // BLOCK, device=device)
    wide = torch.full((2, 8), 2.0**-11, dtype=torch.float16, device=device)
    launch_scaled_linear(
        x, weight.to(FP8), scales, None, wide[:, :5], tiling_of(2, x.dtype),
        spreads=spreads, adds=True,
    )  # fmt: skip
    # 1 + 2^-11 alone would be rounded to 1, and the sum again.
    assert (wide[:, :5] == 1 + 2.0**-10).all() and (wide[:, 5:] == 2.0**-11).all()
    given = wide[:, :5]
    assert scaled_linear(x, weight.to(FP8), scales, add_to=given) is given
    assert (given == 2 + 2.0**-9).all()


@also_interpreted
@on_each_kernel_device
@pytest.mark.parametrize(  # three chunks in float32: rounding to 16 bits hides another order
    ("form", "shape", "dtype"),
    [
        *(("fp8", *each) for each in zip(FP8_SHAPES[::-1], cycle(DTYPES[::-1]), strict=False)),
        *((form, INT4_SHAPES[2], torch.float32) for form in ("32", "128", "nvfp4")),
        *(("plain", *each) for each in zip(PLAIN_SHAPES[::-1], cycle(DTYPES[::-1]), strict=False)),
    ],
    ids=str,
)
def test_spreading_chunks_over_programs_changes_no_bit(
    form: str, shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    for num_rows in (1, 20):
        p = problem(num_rows, shape, dtype, device, form)
        found = [p.total.clone(), p.total.clone()]
        for total, spreads in zip(found, (False, True), strict=True):
            p.launch(total, p.tiling(), spreads=spreads, adds=form != "plain")
        assert torch.equal(*found)
        check(found[0], p, p.bias, *(() if form == "plain" else (p.total,)))


@also_interpreted
@on_each_kernel_device
@on_each_dtype
@pytest.mark.parametrize(("form", "inputs"), [("fp8", 1100), ("32", 1120), ("plain", CHUNK + 72)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    form: str, inputs: int, dtype: torch.dtype, device: str
) -> None:
    p = problem(70, (inputs, 70), dtype, device, form)
    expected = p.run(bias=p.bias)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 9), slice(10, 35)):
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows])


# Inputs and outputs of an 8B Llama's layers.
MODEL_SHAPES = [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)]


def test_a_few_rows_have_a_program_for_each_multiprocessor_twice() -> None:
    for inputs, outputs in MODEL_SHAPES:
        chunk = chunk_of(outputs, inputs)
        assert chunk % BLOCK == 0 and -(-outputs // OUTPUTS) * -(-inputs // chunk) >= MIN_PROGRAMS
    for inputs, chunk in ((1, 128), (1000, 1024), (1025, 640), (4096, 1024)):
        assert chunk_of(64, inputs) == chunk


@on_each_kernel_device
def test_only_many_rows_that_may_differ_between_batches_are_multiplied_in_slices(
    device: str,
) -> None:
    shape = (200, 33 if INTERPRETED else 257)  # the interpreter takes long for each program
    for dtype, num_rows, is_sliced in (
        (torch.bfloat16, MAX_KERNEL_ROWS, False),
        (torch.bfloat16, MAX_KERNEL_ROWS + 1, True),
        (torch.float32, MAX_KERNEL_ROWS + 1, False),
    ):
        p = problem(num_rows, shape, dtype, device)
        scales = p.scales * 1.3  # of rounded weights the outputs are others
        kernels, slices = (p.total.clone() for _ in range(2))
        launch_scaled_linear(
            p.x, p.weight, scales, p.bias, kernels, tiling_of(num_rows, dtype),
            spreads=False, adds=True,
        )  # fmt: skip
        multiply_slices(p.x, p.weight, scales, p.bias, slices, 384, adds=True)
        assert not torch.equal(kernels, slices)
        for invariant in (True, False):
            total = p.total.clone()
            found = scaled_linear(p.x, p.weight, scales, p.bias, add_to=total, invariant=invariant)
            expected = slices if is_sliced and not invariant else kernels
            assert found is total and torch.equal(total, expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        *product(["fp8", "32", "128", "mxfp4", "nvfp4"], MODEL_SHAPES),
        *product(["plain"], [*MODEL_SHAPES, (192, 512), (512, 192)]),
        *(("fp8", (200, 257)), *product(["32", "128", "mxfp4", "nvfp4"], [(224, 257)])),
    ],
    ids=str,
)
def test_the_number_of_rows_changes_no_bit_of_a_row(
    form: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    p = problem(4096, shape, dtype, "cuda", form)
    expected = p.run(bias=p.bias)
    check(expected, p, p.bias)
    has_all = form in ("fp8", "plain") and dtype != torch.float32
    numbers = range(1, 140) if has_all else [1, 2, 8, 9, 16, 17, 33, 64, 65, 129]
    for number in (*numbers, 200, 257, 300, 1024):
        first = 37 * number % (4096 - number)  # other positions in other tiles
        rows = slice(first, first + number)
        assert torch.equal(p.run(rows, bias=p.bias), expected[rows]), number


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_each_dtype
@pytest.mark.parametrize("form", ["fp8", "128", "plain"])
def test_no_tiling_changes_a_bit(form: str, dtype: torch.dtype) -> None:
    p = problem(333, (4096, 1000), dtype, "cuda", form)
    expected = p.run(bias=p.bias)
    sizes = ((16, 64, 4, 4), (32, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3))
    for tiling in starmap(Tiling, sizes):
        for spreads in (False, True):
            found = torch.empty_like(expected)
            p.launch(found, tiling, spreads=spreads, adds=False)
            assert torch.equal(found, expected)


def check_slices(p: Problem, size: int) -> None:
    """With a bias, an output that is added to and has a stride between rows, and both. Weights of
    powers of two are not rounded."""
    (num_rows, inputs), outputs = p.x.shape, len(p.weight)
    # cuBLAS adds at least 8 products to a float32 at a time, which may lose its last bit.
    sum_error = max(inputs * 2.0**-26, SUM_ERROR)
    for bias in (None, p.bias):
        for adds in (False, True):
            wide = p.total.new_full((num_rows, outputs + 8), 7.0)
            part = wide[:, :outputs]
            part.copy_(p.total if adds else torch.full_like(p.total, torch.nan))
            multiply_slices(p.x, p.weight, p.scales, bias, part, size, adds=adds)
            added = [] if bias is None else [bias]
            if adds:
                added.append(p.total)
            check(part, p, *added, sum_error=sum_error)
            assert (wide[:, outputs:] == 7).all()


on_16_bits = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)


@on_each_kernel_device
@on_16_bits
@pytest.mark.parametrize(  # the last slice has one output, all, or some
    ("shape", "size"), [((200, 257), 128), ((200, 96), 256), ((64, 600), 256)], ids=str
)
def test_slices_are_written_to_their_outputs(
    shape: tuple[int, int], size: int, dtype: torch.dtype, device: str
) -> None:
    check_slices(problem(20, shape, dtype, device), size)


def test_slices_are_few_equal_and_bounded() -> None:
    for inputs, outputs in MODEL_SHAPES:
        for num_rows in (300, 8192):
            for has_sums, row_bytes in ((False, 0), (True, 4 * num_rows)):
                size = slice_outputs(num_rows, outputs, inputs, has_sums=has_sums)
                assert 0 < size * max(2 * inputs, row_bytes) <= MAX_BYTES and size % 128 == 0
    assert slice_outputs(2048, 4096, 14336, has_sums=True) == 4096
    assert slice_outputs(8192, 28672, 4096, has_sums=False) == 14336  # all of it would be 224 MiB
    assert slice_outputs(8192, 28672, 4096, has_sums=True) == 4096  # 128 MiB of float32 sums
    assert slice_outputs(2048, 36864, 7168, has_sums=True) == 9216  # four
    assert slice_outputs(2048, 1000, 64, has_sums=True) == 1024
    assert slice_outputs(2048, 1000, 1 << 20, has_sums=True) == 128  # at least


def test_no_two_slices_have_their_sums_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        assert all(each() is None for each in made)
        sums = x.new_zeros(len(x), len(matrix), dtype=torch.float32)
        made.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(scaled_linear_slices, "_float32_product", product)
    p = problem(4, (200, 300), torch.bfloat16, "cpu")
    for adds in (False, True):
        multiply_slices(p.x, p.weight, p.scales, p.bias, p.total, 128, adds=adds)
    assert len(made) == 6


@pytest.fixture
def float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS may otherwise add partial sums in 16 bits."""
    for name in ("bf16", "fp16"):
        option = f"allow_{name}_reduced_precision_reduction"
        monkeypatch.setattr(torch.backends.cuda.matmul, option, False)


def check_like_the_kernel(found: torch.Tensor, kernel: torch.Tensor, p: Problem) -> None:
    """Both are one rounding and their float32 sums away from the same number."""
    sums = magnitudes_of(p) * (max(p.x.shape[1] * 2.0**-26, SUM_ERROR) * 2)
    larger = torch.maximum(found.abs(), kernel.abs()).double()
    assert (
        (found.double() - kernel.double()).abs() <= 2 * ROUNDING[p.x.dtype] * larger + sums
    ).all()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs tensor cores")
@on_16_bits
@pytest.mark.parametrize("shape", [*MODEL_SHAPES, (200, 257)], ids=str)
def test_slices_equal_the_formula_on_the_device(
    shape: tuple[int, int], dtype: torch.dtype, float32_sums: None
) -> None:
    for num_rows in (300, 2048):
        p = problem(num_rows, shape, dtype, "cuda")
        check_slices(p, slice_outputs(num_rows, shape[1], shape[0], has_sums=True))
        kernel = scaled_linear(p.x, p.weight, p.scales)
        found = scaled_linear(p.x, p.weight, p.scales, invariant=False)
        check_like_the_kernel(found, kernel, p)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_slices_in_a_captured_graph(float32_sums: None) -> None:
    """Added to an output with a stride between rows; inputs change between replays."""
    inputs, outputs = 4096, 6144
    p, other = (problem(rows, (inputs, outputs), torch.bfloat16, "cuda") for rows in (512, 513))
    x, total = p.x.clone(), torch.zeros(512, outputs + 8, dtype=torch.bfloat16, device="cuda")
    part = total[:, :outputs]

    def call() -> None:
        scaled_linear(x, p.weight, p.scales, add_to=part, invariant=False)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()  # compiles, and creates cuBLAS's workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for source in (p, replace(p, x=other.x[:512], total=other.total[:512])):
        x.copy_(source.x)
        part.copy_(source.total)
        graph.replay()
        check(part, source, source.total, sum_error=inputs * 2.0**-26)
        assert (total[:, outputs:] == 0).all()
