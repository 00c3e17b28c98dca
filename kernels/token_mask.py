"""Excludes tokens by bitmasks: their logits become -inf. One Triton kernel on CUDA, elsewhere the
plain-torch reference."""

import torch

from tllm_spec.kernels.triton_support import has_kernels


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, bitmasks: torch.Tensor) -> None:
    """In place. logits `[R, V]`, contiguous rows; rows `[M]` int64: the rows to mask, none twice;
    bitmasks `[M, ceil(V / 32)]` int32: bit i % 32 of word i // 32 is set if token i is allowed."""
    if not has_kernels(logits.device):
        mask_tokens_reference(logits, rows, bitmasks)
        return
    from tllm_spec.kernels.token_mask_triton import mask_tokens_triton

    mask_tokens_triton(logits, rows, bitmasks)


def mask_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, bitmasks: torch.Tensor) -> None:
    """Arguments of `mask_tokens`."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmasks.unsqueeze(2) >> bits) & 1
    allowed = allowed.flatten(1)[:, : logits.shape[1]].bool()
    masked = logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf)
    logits.index_copy_(0, rows, masked)
