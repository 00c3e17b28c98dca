"""`append_tokens` and `match_suffixes` as Triton kernels, one program per request. Importing this
file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.suffix_match import Matches

BLOCK = 4096  # positions that are compared at a time


def append_tokens_triton(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """See `append_tokens`."""
    assert tokens.is_contiguous() and texts.stride(1) == 1
    width = tokens.shape[1]
    _append[(len(slots),)](
        texts,
        texts.stride(0),
        texts.shape[1],
        slots,
        kv_lens,
        tokens,
        lens,
        width,
        triton.next_power_of_2(width),
        **programmatic_launch(slots.device),
        num_warps=1,
    )


def match_suffixes_triton(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    draft_len: int,
    max_match: int,
) -> Matches:
    """See `match_suffixes`."""
    assert texts.stride(1) == 1
    drafts = torch.empty((len(slots), draft_len), dtype=torch.int64, device=slots.device)
    num_drafts, lengths = torch.empty_like(slots), torch.empty_like(slots)
    _match[(len(slots),)](
        texts,
        texts.stride(0),
        texts.shape[1],
        slots,
        kv_lens,
        drafts,
        num_drafts,
        lengths,
        max_match,
        draft_len,
        triton.next_power_of_2(draft_len),
        BLOCK,
        **programmatic_launch(slots.device),
        num_warps=8,
    )
    return Matches(drafts, num_drafts, lengths)


@triton.jit(do_not_specialize=["stride", "max_len"])  # type: ignore[untyped-decorator]  # triton has no types
def _append(
    texts: tl.tensor, stride: tl.tensor, max_len: tl.tensor, slots: tl.tensor, kv_lens: tl.tensor,
    tokens: tl.tensor, lens: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, length = tl.load(slots + request), tl.load(lens + request)
    position = tl.load(kv_lens + slot) + 1 - length + column
    token = tl.load(tokens + request * width + column, mask=column < width, other=0)
    is_new = (column < width) & (column < length) & (position < max_len)
    tl.store(texts + slot * stride + position, tl.maximum(token, 0).to(tl.int32), mask=is_new)


@triton.jit(do_not_specialize=["stride", "max_len", "max_match"])  # type: ignore[untyped-decorator]  # triton has no types
def _match(
    texts: tl.tensor, stride: tl.tensor, max_len: tl.tensor, slots: tl.tensor, kv_lens: tl.tensor,
    drafts: tl.tensor, num_drafts: tl.tensor, lengths: tl.tensor, max_match: tl.tensor,
    width: tl.constexpr, width_block: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`best` is the length of the best match in its high half, and in its low half where the drafts
    begin, one position after the match."""
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    end = tl.minimum(tl.load(kv_lens + slot), max_len - 1).to(tl.int32)
    text = texts + slot * stride
    best = end.to(tl.int64)
    for first in range(0, end, block):
        position = first + tl.arange(0, block)
        is_alive = position < end
        length = tl.zeros([block], tl.int32)
        back = first * 0
        num_alive = tl.max(is_alive.to(tl.int32), axis=0)
        while num_alive > 0:
            last = tl.load(text + end - back)
            is_alive = is_alive & (position >= back)
            own = tl.load(text + position - back, mask=is_alive, other=-1)
            is_alive = is_alive & (own == last)
            length += is_alive.to(tl.int32)
            back += 1
            num_alive = tl.where(back < max_match, tl.max(is_alive.to(tl.int32), axis=0), 0)
        score = length.to(tl.int64) * 4294967296 + position + 1
        best = tl.maximum(best, tl.max(tl.where(length > 0, score, 0), axis=0))
    start = best % 4294967296
    column = tl.arange(0, width_block)
    is_draft = column < width
    token = tl.load(text + start + column % (end + 1 - start), mask=is_draft, other=0)
    tl.store(drafts + request * width + column, token.to(tl.int64), mask=is_draft)
    length = best // 4294967296
    tl.store(num_drafts + request, tl.where(length > 0, width, 0))
    tl.store(lengths + request, length)
