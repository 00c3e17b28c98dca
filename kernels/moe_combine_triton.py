"""The Triton kernel of moe_combine.py, which describes inputs and outputs. Importing this file
imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.moe_combine import OwnExperts
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_BLOCK = 1024  # columns per program


def moe_combine_triton(
    parts: torch.Tensor,
    weights: torch.Tensor | None,
    top_k: int,
    add_to: torch.Tensor | None = None,
    own: OwnExperts | None = None,
) -> torch.Tensor:
    """See `moe_combine`."""
    num_rows, size = parts.shape[0] // top_k, parts.shape[1]
    output = parts.new_empty(num_rows, size) if add_to is None else add_to
    assert parts.is_contiguous() and output.is_contiguous() and output.shape == (num_rows, size)
    if num_rows:
        moe_combine_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            parts,
            weights,
            add_to,
            output,
            None if own is None else own.experts,
            FIRST=0 if own is None else own.first,
            NUMBER=0 if own is None else own.number,
            SIZE=size,
            TOP_K=top_k,
            BLOCK=_BLOCK,
            num_warps=4,
            **programmatic_launch(parts.device),
        )
    return output


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def moe_combine_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    add_to: tl.tensor,
    output: tl.tensor,
    experts: tl.tensor,
    FIRST: tl.constexpr,
    NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        assignment = row * TOP_K + choice
        is_read = real
        if experts is not None:
            number = tl.load(experts + assignment) - FIRST
            is_read = columns < tl.where((number >= 0) & (number < NUMBER), SIZE, 0)
        part = tl.load(parts + assignment * SIZE + columns, mask=is_read, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + assignment)
        total += part
    if add_to is not None:
        total += tl.load(add_to + row * SIZE + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, total.to(output.dtype.element_ty), mask=real)
