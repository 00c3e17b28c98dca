"""Bounds the memory that sampling takes next to the logits: large batches are sampled in parts.

The bytes per logit are an upper bound of what the sampler's steps allocate at once on a CPU;
`tests/executor/sampling/test_working_memory.py` compares them with the allocations."""

import torch

from tllm_spec.executor.sampling.row_group import RowGroup

SAMPLING_BYTES = 2 << 30
# Penalties, masks, filters, log probabilities, rejection sampling: float32 copies of the rows,
# 64-bit counts, sorted copies and their weights.
BYTES_PER_LOGIT = 56
# The fused kernels read logits in the model's own dtype: only the sampled rows are copied, and a
# filtered row has one int32 count for each 16-bit logit.
FILTER_BYTES_PER_ROW = 4 << 16


def bytes_per_row(group: RowGroup, logits: torch.Tensor, *, rejection: bool) -> int:
    """What sampling one row of the group's logits `[R, V]` allocates at most."""
    vocab_size = logits.shape[1]
    is_fused = logits.is_cuda and logits.element_size() == 2
    if not is_fused or rejection or group.is_edited or not group.with_logprobs.is_empty:
        return BYTES_PER_LOGIT * vocab_size
    if group.sampled.is_empty:
        return 0
    return logits.element_size() * vocab_size + (FILTER_BYTES_PER_ROW if group.filtered else 0)


def rows_at_once(bytes_per_row: int) -> int:
    return max(1, SAMPLING_BYTES // max(1, bytes_per_row))
