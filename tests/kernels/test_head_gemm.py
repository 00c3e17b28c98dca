"""The GEMM of each head, against the reference."""

import pytest
import torch

from tests.kernels.interpreter import (
    INTERPRETED,
    on_each_kernel_device,
    only_outside_the_interpreter,
)
from tllm_spec.kernels.gemm.head_gemm import MAX_ROWS, head_gemm

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def operands(
    rows: int, heads: int, depth: int, width: int, *, by_depth: bool, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x is a slice of wider heads, the weight a slice of a fused one, and the output transposed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, heads, depth + 8, generator=generator)[..., :depth]
    if by_depth:
        fused = torch.randn(heads, 8 + width, depth, generator=generator)
        weight = fused[:, 8:].mT
    else:
        weight = torch.randn(heads, depth + 8, width, generator=generator)[:, :depth]
    out = torch.full((heads, rows, width), torch.nan).transpose(0, 1)
    return x.to(device), weight.to(device), out.to(device)


@on_each_kernel_device
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("by_depth", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "depth", "width"),
    # The interpreter takes long for each block of the width.
    [
        (1, 2, 128, 512),
        (5, 3, 200, 24),
        (40, 1, 16, 40),
        (MAX_ROWS, 2, 300, 140 if INTERPRETED else 600),
    ],
)
def test_the_kernel_equals_the_reference(
    rows: int, heads: int, depth: int, width: int, by_depth: bool, dtype: torch.dtype, device: str
) -> None:
    x, weight, out = operands(rows, heads, depth, width, by_depth=by_depth, device=device)
    x, weight, out = x.to(dtype), weight.to(dtype) * depth**-0.5, out.to(dtype)
    expected = torch.empty_like(out)
    head_gemm(x, weight, out)
    head_gemm.reference(x, weight, expected)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


@only_outside_the_interpreter
def test_the_reference_multiplies_each_head_with_its_own_weight() -> None:
    x, weight, out = operands(3, 2, 5, 7, by_depth=True, device="cpu")
    head_gemm(x, weight, out)
    for head in range(2):
        torch.testing.assert_close(out[:, head], x[:, head] @ weight[head])
