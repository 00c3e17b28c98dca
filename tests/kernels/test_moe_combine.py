"""The weighted sum over a token's experts."""

import pytest
import torch

from tests.kernels.interpreter import ROUNDING, check_like_the_reference, on_each_kernel_device
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.routing import OwnExperts, moe_combine

CASES = [(1, 8, 2048), (5, 2, 64), (3, 1, 1030), (0, 4, 32), (7, 6, 100)]  # tokens, k, columns
on_each_case = pytest.mark.parametrize("case", CASES, ids=str)
on_each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def problem(
    case: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the experts, weights, residual stream."""
    (num_tokens, top_k, size), generator = case, torch.Generator().manual_seed(0)
    parts = torch.randn(num_tokens * top_k, size, generator=generator).to(device, dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
    return parts, weights, torch.randn(num_tokens, size, generator=generator).to(device, dtype)


@on_each_case
@on_each_dtype
def test_the_reference_equals_the_formula(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    parts, weights, residual = problem(case, dtype, "cpu")
    by_token = parts.view(case).double()
    expected = (by_token * weights[..., None].double()).sum(1) + residual.double()
    found = moe_combine.reference(parts, weights, case[1], residual)
    assert found is residual
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else ROUNDING[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2e-6)
    unweighted = moe_combine.reference(parts, None, case[1])
    torch.testing.assert_close(unweighted.double(), by_token.sum(1), rtol=tolerance, atol=2e-6)


@on_each_kernel_device
@on_each_case
@on_each_dtype
def test_the_kernel_equals_its_reference(
    case: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    assert has_kernels(torch.device(device))
    parts, weights, residual = problem(case, dtype, device)
    for own_weights in (weights, None):
        expected = moe_combine.reference(parts, own_weights, case[1])
        check_like_the_reference(moe_combine(parts, own_weights, case[1]), expected)
    expected = moe_combine.reference(parts, weights, case[1], residual.clone())
    assert moe_combine(parts, weights, case[1], residual) is residual
    check_like_the_reference(residual, expected)


@on_each_kernel_device
def test_outputs_of_other_ranks_experts_are_not_read(device: str) -> None:
    """They are NaN."""
    parts, weights, residual = problem((9, 4, 130), torch.float32, device)
    experts = torch.arange(36, dtype=torch.int32, device=device).view(9, 4) % 8
    is_own = (experts >= 2) & (experts < 5)
    expected = moe_combine.reference(parts, weights * is_own, 4, residual.clone())
    parts[~is_own.flatten()] = torch.nan
    own = OwnExperts(experts, 2, 3)
    for combine in (moe_combine, moe_combine.reference):
        found = combine(parts, weights, 4, residual.clone(), own)
        torch.testing.assert_close(found, expected)
