"""The factor of attention sinks against the softmax with one more score: the reference here, the
kernel under Triton's interpreter in a subprocess, and on a CUDA device (`-m gpu`)."""

import math

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.attention.attention_sinks import add_sinks


def check(device: str, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, heads, 7, generator=generator, dtype=torch.float64) * 3
    scores[1] = -torch.inf  # a row without keys
    values = torch.randn(5, heads, 7, head_dim, generator=generator, dtype=torch.float64)
    sinks = torch.linspace(-3, 8, heads)
    weights = scores.softmax(-1).nan_to_num(0)
    room = torch.zeros(5, heads + 1, head_dim, device=device, dtype=dtype)
    output = room[:, 1:].copy_((weights.unsqueeze(2) @ values).squeeze(2))
    log_sums = (scores.logsumexp(-1) / math.log(2)).float().to(device)
    add_sinks(output, log_sums, sinks.to(device))
    wide = torch.cat((scores, sinks.double().expand(5, -1).unsqueeze(2)), -1).softmax(-1)
    expected = (wide[..., :-1].unsqueeze(2) @ values).squeeze(2)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=rounding, atol=rounding)
    assert room[:, 0].count_nonzero() == 0


def test_the_reference_equals_the_softmax_with_one_more_score() -> None:
    check("cpu", 6, 16, torch.float32)


@on_each_kernel_device
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 16), (64, 64), (5, 80), (3, 256)])
def test_the_kernel_equals_the_softmax_with_one_more_score(
    heads: int, head_dim: int, device: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(device, heads, head_dim, dtype)
