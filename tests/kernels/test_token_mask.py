"""Bitmasks against a plain loop, and the kernel against its reference."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.token_mask import mask_tokens, mask_tokens_reference

SHAPES = [(1, 31), (3, 64), (2, 5000)]
on_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def arguments(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of two rows more than are masked."""
    num_masks, vocab_size = shape
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_masks + 2, vocab_size, generator=generator)
    words = torch.randint(
        -(2**31), 2**31, (num_masks, -(-vocab_size // 32)), generator=generator
    ).to(torch.int32)
    words[0, 0] = -1  # all allowed, the sign bit included
    return logits, torch.arange(num_masks).flip(0) + 1, words


@on_each_shape
def test_only_excluded_tokens_of_the_given_rows_become_minus_infinity(
    shape: tuple[int, int],
) -> None:
    logits, rows, words = arguments(shape)
    expected = logits.clone()
    for row, own in zip(rows.tolist(), words.tolist(), strict=True):
        for token in range(shape[1]):
            if not (own[token // 32] >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    mask_tokens_reference(logits, rows, words)
    assert torch.equal(logits, expected)


@on_each_kernel_device
@on_each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    logits, rows, words = (each.to(device) for each in arguments(shape))
    logits = logits.to(dtype)
    expected = logits.clone()
    mask_tokens_reference(expected, rows, words)
    mask_tokens(logits, rows, words)
    assert torch.equal(logits, expected)
