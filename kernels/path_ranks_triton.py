"""`path_ranks` as a Triton kernel, one program per request. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.rank_codes import END, NOTHING, OFF_CHAIN


def path_ranks_triton(
    parents: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """See `path_ranks`."""
    assert all(each.is_contiguous() for each in (slots, num_drafts, rows, lens))
    assert parents.stride(1) == 1
    found = torch.empty_like(rows)
    _path_ranks[(len(slots),)](
        parents,
        parents.stride(0),
        slots,
        num_drafts,
        rows,
        lens,
        found,
        width,
        triton.next_power_of_2(width),
        rows.shape[1],
        END,
        OFF_CHAIN,
        NOTHING,
        **programmatic_launch(slots.device),
        num_warps=1,
    )
    return found


@triton.jit(do_not_specialize=["parents_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def _path_ranks(
    all_parents: tl.tensor, parents_stride: tl.tensor, slots: tl.tensor, all_num_drafts: tl.tensor,
    rows: tl.tensor, lens: tl.tensor, found: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    path: tl.constexpr, end: tl.constexpr, off_chain: tl.constexpr, nothing: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, last = tl.load(slots + request), tl.load(lens + request) - 1
    parent = tl.load(all_parents + slot * parents_stride + node, mask=node < width, other=-1)
    is_draft = (node > 0) & (node < width) & (node <= tl.load(all_num_drafts + request))
    own, strayed = request * path, tl.zeros([], tl.int64)
    for column in tl.range(0, path):
        row = tl.load(rows + own + column)
        is_child = is_draft & (parent == row)
        tried = tl.sum(is_child.to(tl.int64), axis=0)
        if column + 1 < path:
            next_row = tl.load(rows + own + column + 1)
            rank = tl.sum((is_child & (node < next_row)).to(tl.int64), axis=0)
        else:
            rank = tl.zeros([], tl.int64)
            tried = tl.zeros([], tl.int64)
        value = tl.where(column < last, rank, end + tried) + off_chain * strayed
        tl.store(found + own + column, tl.where(column > last, nothing, value))
        strayed = tl.where((rank > 0) & (column < last), 1, strayed)
