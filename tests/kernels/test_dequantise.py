"""FP8 weights as numbers of another type, by bits: under Triton's interpreter in a subprocess, and
on a CUDA device (`-m gpu`)."""

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import (
    on_each_kernel_device,
    only_outside_the_interpreter,
    only_with_the_compiler,
    stored,
)
from tllm_spec.kernels.gemm.fp8_numbers import (
    BLOCK,
    BLOCKS_OF_PROGRAM,
    NUM_WARPS,
    dequantise_rows,
    dequantised,
)

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Outputs and inputs: several programs, incomplete blocks of inputs, and rows that are not aligned.
SHAPES = [(70, 256), (67, 200), (3, 1), (5, 387), (33, 128)]


def problem(shape: tuple[int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every finite code, and scales of many sizes with 24 bits."""
    outputs, inputs = shape
    codes = torch.tensor([code for code in range(256) if code % 128 != 127], dtype=torch.uint8)
    places = torch.arange(outputs * inputs) * 37 % len(codes)
    size = (outputs, -(-inputs // BLOCK))
    generator = torch.Generator().manual_seed(inputs)
    scales = torch.rand(size, generator=generator) + 0.5
    scales *= torch.randint(-9, 3, size, generator=generator).float().exp2()
    return codes[places].view(FP8).view(shape).to(device), scales.to(device)


def by_hand(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32, one scale at a time."""
    expected = weight.float()
    for block, scale in enumerate(scales.t()):
        expected[:, block * BLOCK : (block + 1) * BLOCK] *= scale[:, None]
    return expected


@only_outside_the_interpreter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_rounds_the_product(shape: tuple[int, int]) -> None:
    weight, scales = problem(shape, "cpu")
    for dtype in DTYPES:
        out = torch.full(shape, torch.nan, dtype=dtype)
        dequantise_rows(weight, scales, out)
        assert torch.equal(out, by_hand(weight, scales).to(dtype))
        assert torch.equal(out, dequantised(weight, scales, dtype))


@on_each_kernel_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_rounds_the_product(shape: tuple[int, int], device: str) -> None:
    weight, scales = problem(shape, device)
    for dtype in DTYPES:
        wide = torch.full((shape[0] + 1, shape[1]), 7.0, dtype=dtype, device=device)
        dequantise_rows(weight, scales, wide[:-1])
        assert torch.equal(wide[:-1], stored(by_hand(weight, scales), dtype))
        assert (wide[-1] == 7).all()  # nothing is written past the end


@on_each_kernel_device
def test_slices_of_rows_have_their_own_scales(device: str) -> None:
    weight, scales = problem((70, 256), device)
    whole, sliced = (torch.empty(70, 256, device=device) for _ in range(2))
    dequantise_rows(weight, scales, whole)
    for first in range(0, 70, 32):
        own = slice(first, first + 32)
        dequantise_rows(weight[own], scales[own], sliced[own])
    assert torch.equal(sliced, whole) and torch.equal(whole, by_hand(weight, scales))


@only_with_the_compiler
@pytest.mark.parametrize("inputs", [4096, 14336, 1040])
def test_loads_and_stores_have_16_bytes(inputs: int) -> None:
    from tllm_spec.kernels.gemm.fp8_numbers import dequantise_kernel

    types = {"weight": "*fp8e4nv", "scales": "*fp32", "out": "*bf16"}
    constants = {"IN": inputs, "BLOCK": BLOCK, "BLOCKS": BLOCKS_OF_PROGRAM, "PDL": True}
    code = compiled_for_hopper(dequantise_kernel, types, constants, num_warps=NUM_WARPS)
    lines = code.asm["ptx"].splitlines()
    loads, stores = ([line for line in lines if f"{name}.global" in line] for name in ("ld", "st"))
    wide = [line for line in loads if ".v4.b32" in line]
    weights = BLOCKS_OF_PROGRAM * BLOCK // (32 * NUM_WARPS)  # of a thread
    assert len(wide) == weights // 16 and all("L2::cache_hint" in line for line in wide)
    assert len(stores) == weights // 8 and all(".v4.b32" in line for line in stores)
