"""Bitmasks against a plain loop, and the kernel against its reference."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.sampling.logit_filters import mask_tokens

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
    mask_of_row = torch.arange(num_masks + 2, dtype=torch.int32).flip(0) - 1
    return logits, mask_of_row.where(mask_of_row < num_masks, -1), words


@on_each_shape
def test_only_excluded_tokens_of_rows_with_a_mask_become_minus_infinity(
    shape: tuple[int, int],
) -> None:
    logits, mask_of_row, words = arguments(shape)
    assert sorted(mask_of_row.tolist()) == [-1, -1, *range(shape[0])]
    expected = logits.clone()
    for row, index in enumerate(mask_of_row.tolist()):
        for token in range(shape[1] if index >= 0 else 0):
            if not (int(words[index, token // 32]) >> (token % 32)) & 1:
                expected[row, token] = -torch.inf
    mask_tokens.reference(logits, mask_of_row, words)
    assert torch.equal(logits, expected)


@on_each_shape
def test_some_columns_are_masked_like_the_whole(shape: tuple[int, int]) -> None:
    logits, mask_of_row, words = arguments(shape)
    expected, first, last = logits.clone(), shape[1] // 3, shape[1] - 4
    mask_tokens.reference(expected, mask_of_row, words)
    own = logits[:, first:last].contiguous()
    mask_tokens.reference(own, mask_of_row, words, first)
    assert torch.equal(own, expected[:, first:last])


@on_each_kernel_device
@on_each_shape
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, first: int, device: str
) -> None:
    logits, mask_of_row, words = (each.to(device) for each in arguments(shape))
    logits = logits.to(dtype)[:, first:].contiguous()
    expected = logits.clone()
    mask_tokens.reference(expected, mask_of_row, words, first)
    mask_tokens(logits, mask_of_row, words, first)
    assert torch.equal(logits, expected)
