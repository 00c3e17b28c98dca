"""The grouped GEMM of MXFP4 in CUDA: compilation and layouts, and on a CUDA device (`-m gpu`) that
its bits are the Triton kernel's. The formula is that of test_grouped_gemm.py."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.test_grouped_gemm import GPT_OSS, LIMIT, Problem, Shape, problem
from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.experts import grouped_gemm
from tllm_spec.kernels.experts import grouped_mxfp4 as module
from tllm_spec.kernels.experts.grouped_gemm import ROWS
from tllm_spec.kernels.experts.grouped_mxfp4 import (
    TILINGS,
    Tiling,
    definitions,
    num_tiles,
    serves_mxfp4,
)

MULTIPROCESSOR_BYTES, OF_CTA = 228 << 10, 1 << 10  # of shared memory, and what each CTA takes more


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("block_rows", "gated"), TILINGS)
@pytest.mark.usefixtures("own_cache")
def test_the_source_compiles(block_rows: int, gated: bool) -> None:
    macros = definitions(block_rows, 2880, gated)
    assert nvrtc.compile_source("grouped_mxfp4.cu", "sm_90", macros).startswith(b"\x7fELF")


@pytest.mark.parametrize(("block_rows", "gated"), TILINGS)
def test_the_ctas_of_a_multiprocessor_share_its_memory(block_rows: int, gated: bool) -> None:
    assert block_rows in {rows for _, rows in ROWS}
    tiling = TILINGS[block_rows, gated]
    of_cta = tiling.shared_bytes(block_rows) + OF_CTA
    assert tiling.ctas * of_cta <= MULTIPROCESSOR_BYTES
    assert tiling.shared_bytes(block_rows) <= nvrtc.SHARED_BYTES


@pytest.mark.parametrize("tiling", TILINGS.values())
@pytest.mark.parametrize("features", [512, 1000, 2880])
def test_tiles_cover_the_outputs(features: int, tiling: Tiling) -> None:
    for gated in (False, True):
        width = tiling.outputs // 2 if gated else tiling.outputs
        number = num_tiles(features, gated, tiling)
        assert (number - 1) * width < features <= number * width


def test_the_kernels_argument_has_the_same_fields_in_python_and_cuda() -> None:
    source = Path(module.__file__).with_name("grouped_mxfp4.cu").read_text(encoding="utf-8")
    (declared,) = re.findall(r"struct GroupedGemm {\n(.*?)\n\n", source, re.DOTALL)
    fields = []
    for line in declared.splitlines():
        found = re.fullmatch(r" *(.*?)((?:\*?\w+, )*\*?\w+);.*", line.replace("* ", " *"))
        assert found is not None
        number = ctypes.c_float if found[1] == "float " else ctypes.c_int
        for name in found[2].split(", "):
            fields.append((name.strip("*"), ctypes.c_void_p if "*" in name else number))
    assert fields == list(module._Arguments._fields_)


def test_a_tensor_on_the_cpu_is_not_served() -> None:
    p = problem("mxfp4 32", Shape(3, 2, 256, 128), 9, torch.bfloat16, "cpu")
    rows = replace(p.rows, block_rows=16)
    assert not serves_mxfp4(p.x, p.layers[0].weight, rows, True)


def outputs(p: Problem, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    inner = p.inner(limit)
    return inner, p.output(inner)


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize(
    "shape",
    [GPT_OSS, Shape(5, 2, 200, 128), Shape(3, 1, 136, 328), Shape(16, 4, 1024, 512)],
    ids=str,
)
def test_the_bits_are_those_of_the_triton_kernel(
    shape: Shape, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("mxfp4 32", shape, 512, torch.bfloat16, "cuda")
    seen = set()
    for number in (1, 3, 8, 9, 17, 40, 64, 100, 256, 512):
        own = p.of(slice(number))
        seen.add(own.rows.block_rows)
        is_served = serves_mxfp4(own.x, p.layers[0].weight, own.rows, True)
        assert is_served == (own.rows.block_rows <= 64)
        found = outputs(own, limit)
        with monkeypatch.context() as patch:
            patch.setattr(grouped_gemm, "serves_mxfp4", lambda *given: False)
            expected = outputs(own, limit)
        for each, other in zip(found, expected, strict=True):
            assert torch.equal(each, other), number
    assert seen >= {16, 32, 64}


@pytest.mark.gpu
def test_all_codes_and_exponents_have_the_bits_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of the identity give the weights themselves. Their exponents are all with which the
    largest number is finite."""
    p = problem("mxfp4 32", Shape(2, 1, 512, 256), 32, torch.bfloat16, "cuda")
    layer = p.layers[1]
    assert layer.scales is not None
    scales = torch.arange(layer.scales.numel(), device="cuda").view(layer.scales.shape) % 250
    own = replace(layer, scales=scales.byte(), bias=None)
    p = replace(p, layers=(p.layers[0], own))
    for inputs in torch.eye(256, device="cuda", dtype=torch.bfloat16).split(32):
        found = p.output(inputs.contiguous())
        with monkeypatch.context() as patch:
            patch.setattr(grouped_gemm, "serves_mxfp4", lambda *given: False)
            assert torch.equal(found, p.output(inputs.contiguous()))
