"""The Triton kernel of gated_norm.py, which describes inputs and outputs. Importing this file
imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin


def gated_norm_triton(
    heads: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `gated_norm`."""
    num_rows, num_heads, size = heads.shape
    assert heads.is_contiguous() and gates.stride(1) == 1 and weight.is_contiguous()
    output = gates.new_empty((num_rows, num_heads * size))
    gated_norm_kernel[(num_rows, num_heads)](
        heads,
        gates,
        gates.stride(0),
        weight,
        output,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=1,
        **programmatic_launch(gates.device),
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def gated_norm_kernel(
    heads: tl.tensor,
    gates: tl.tensor,
    gate_stride: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, heads)."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    place = (row * tl.num_programs(1) + head) * SIZE + columns
    values = tl.load(heads + place, mask=real, other=0.0)
    gate = tl.load(gates + row * gate_stride + head * SIZE + columns, mask=real, other=0.0)
    gate = gate.to(tl.float32)
    weights = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
    result = values * tl.rsqrt(mean_square + eps) * weights * gate * tl.sigmoid(gate)
    tl.store(output + place, result.to(output.dtype.element_ty), mask=real)
