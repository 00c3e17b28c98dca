"""The GEMM with slices of an FP8 weight against the formula, under Triton's interpreter in a
subprocess, and on a CUDA device (`-m gpu`) with the shapes of models and in a captured graph."""

import weakref
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, ROUNDING, on_each_kernel_device
from tests.kernels.test_scaled_linear import (
    DTYPES,
    MODEL_SHAPES,
    SUM_ERROR,
    Problem,
    check,
    formula,
    magnitudes_of,
    problem,
)
from tllm_spec.kernels.gemm import scaled_linear as scaled_linear_slices
from tllm_spec.kernels.gemm.scaled_linear import (
    MAX_BYTES,
    multiply_slices,
    scaled_linear,
    slice_outputs,
)


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
    sums = formula(magnitudes_of(p), p.x.abs()) * (max(p.x.shape[1] * 2.0**-26, SUM_ERROR) * 2)
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
