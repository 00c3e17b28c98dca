"""Weights of 4 bits: how they are stored, converted and dequantised, and where many rows multiply
slices. test_scaled_linear.py has what they share with FP8. Under Triton's interpreter in a
subprocess, and on a CUDA device (`-m gpu`)."""

import re
from typing import Any

import pytest
import torch

from tests.kernels.hopper import compiled_for_hopper
from tests.kernels.interpreter import on_each_kernel_device, only_with_the_compiler, stored
from tests.kernels.linear_problem import problem
from tests.kernels.test_scaled_linear import DTYPES, INT4_FORMS, INT4_SHAPES, on_each_dtype
from tllm_spec.kernels.gemm.int4_weights import (
    BLOCK,
    HALF,
    dequantise_int4,
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
    scaled_linear,
)

on_each_form = pytest.mark.parametrize("form", INT4_FORMS)


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
def test_a_dequantised_weight_is_rounded_once(form: str, dtype: torch.dtype, device: str) -> None:
    """By the kernel and by the reference. The interpreter truncates to bfloat16."""
    for inputs, outputs in INT4_SHAPES:
        p = problem(1, (inputs, outputs), dtype, device, form)
        found = torch.empty(outputs, inputs, dtype=dtype, device=device)
        dequantise_int4(p.weight, p.scales, p.group, found)
        expected = p.numbers.float()
        assert torch.equal(found, stored(expected, dtype))
        reference = int4_dequantised(unpacked(p.weight, inputs), p.scales, p.group, dtype)
        assert torch.equal(reference, expected.to(dtype))


@on_each_kernel_device
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@on_each_form
def test_every_weight_is_converted_exactly_with_its_scale_and_zero_point(
    form: str, dtype: torch.dtype, device: str
) -> None:
    """With the identity as x the output is the weight, rounded to the type of x."""
    p = problem(1, (160, 67), dtype, device, form)
    x = torch.eye(160, dtype=dtype, device=device)
    found = scaled_linear(x, p.weight, p.scales, group=p.group)
    assert torch.equal(found.t(), stored(p.numbers.float(), dtype))
    assert set(unpacked(p.weight, 160).flatten().tolist()) == set(range(16))


@on_each_kernel_device
@pytest.mark.parametrize("adds", [False, True])
def test_many_rows_that_need_not_be_batch_invariant_multiply_slices(
    adds: bool, device: str
) -> None:
    """The weight is rounded to the type of x before it is multiplied."""
    p = problem(MAX_KERNEL_ROWS + 1, (96, 48), torch.float16, device, "32")
    total = p.total.clone()
    found = p.run(invariant=False, bias=p.bias, add_to=total if adds else None)
    expected = p.x.double() @ p.numbers.half().double().t() + p.bias.double()
    expected += p.total.double() * adds
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-10, atol=1e-3)
    assert (found is total) == adds


def test_many_rows_that_need_not_be_batch_invariant_have_as_many_chunks_as_run_at_once() -> None:
    assert chunk_of_tiles(192, 4096) == chunk_of_tiles(896, 4096) == 4096
    assert chunk_of_tiles(128, 14336) == 7168
    assert chunk_of_tiles(1, 2144) == 768  # no chunk is much shorter than MIN_CHUNK


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
