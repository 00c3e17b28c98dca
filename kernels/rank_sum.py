"""The sum of all ranks' tensors in one kernel, of which each rank runs one at the same time: every
rank writes its values into the memory of all others (rank_lines.py), and adds what it finds in its
own."""

from collections.abc import Sequence

import torch

from tllm_spec.kernels.rank_lines import WORD_BYTES, RankLines
from tllm_spec.kernels.triton_support import has_kernels

DTYPES = (torch.float32, torch.bfloat16)


def serves(values: torch.Tensor, capacity: int) -> bool:
    """Whether `rank_sum` serves these values: it follows from size, dtype and layout, so it is the
    same on all ranks. capacity: the most words of a sum."""
    num_bytes = values.numel() * values.element_size()
    fits = 0 < num_bytes <= capacity * WORD_BYTES and num_bytes % WORD_BYTES == 0
    is_aligned = values.is_contiguous() and values.data_ptr() % WORD_BYTES == 0
    return fits and is_aligned and values.dtype in DTYPES and has_kernels(values.device)


def rank_sum(lines: RankLines, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
    """The sum of all ranks' values in place or, if `add_to` is given, added to that. All ranks add
    in the order of the ranks in float32, and round once before and once after they add to `add_to`:
    the same bits on each. values, add_to: contiguous, of one shape and dtype, which `serves`."""
    from tllm_spec.kernels.rank_sum_triton import rank_sum_triton

    assert serves(values, lines.capacity)  # more lines would lie outside of the other ranks' memory
    assert add_to is None or (add_to.shape, add_to.dtype) == (values.shape, values.dtype)
    rank_sum_triton(lines, values, add_to)


def rank_sum_reference(
    parts: Sequence[torch.Tensor], add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """What `rank_sum` computes from the values of all ranks, in their order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    rounded = total.to(parts[0].dtype)
    return rounded if add_to is None else (add_to.float() + rounded.float()).to(add_to.dtype)
