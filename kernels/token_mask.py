"""Excludes tokens by bitmasks: their logits become -inf. One Triton kernel on CUDA, elsewhere the
plain-torch reference."""

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("token_mask_triton.mask_tokens_triton")
def mask_tokens(
    logits: torch.Tensor, mask_of_row: torch.Tensor, bitmasks: torch.Tensor, first: int = 0
) -> None:
    """Sets excluded tokens to -inf, in place. logits `[R, n]`, contiguous rows, of the tokens from
    `first` on; mask_of_row `[R]` int32: the number of each row's bitmask, -1 for none; bitmasks
    `[M, ceil(V / 32)]` int32: bit i % 32 of word i // 32 is set if token i is allowed."""
    (rows,) = torch.nonzero(mask_of_row >= 0, as_tuple=True)
    words = bitmasks.index_select(0, mask_of_row.index_select(0, rows))
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, first:][:, : logits.shape[1]].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))
