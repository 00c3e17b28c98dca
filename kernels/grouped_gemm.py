"""The two linear layers of a mixture of experts, each one GEMM per expert that is hit: gate and up
projections with SwiGLU, and the down projection. A Triton kernel if Triton is available, otherwise
the plain-torch reference, which loops over the experts.

Weights of an expert that no token takes are not read. Sums are float32 and rounded once. Weights
may be FP8 or have 4 bits, as in scaled_linear.py, and with FP8 weights activations may be codes, as
in fp8_linear.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.fp8_linear import fp8_linear, inputs_added
from tllm_spec.kernels.grouped_tilings import MOST_ROWS, Form, Tiling, tilings_of
from tllm_spec.kernels.int4_weights import (
    check_int4,
    int4_dequantised,
    is_exact,
    kernel_words,
    num_sums,
    unpacked,
)
from tllm_spec.kernels.moe_permute import ExpertRows
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear import check_scaled, dequantised
from tllm_spec.kernels.shared_memory import shared_memory_bytes

GATE_SLOPE = 1.702  # of gpt-oss's SwiGLU


@dataclass(frozen=True)
class ExpertWeights:
    """One linear layer of E experts, in contiguous tensors."""

    weight: torch.Tensor
    """`[E, N, K]` of the type of x, or FP8; or `packed` codes of 4 bits. Of FP8 for codes of
    activations, the reference also takes float64."""
    scales: torch.Tensor | None = None
    """float32 `[E, N, ceil(K / 128)]` of FP8. For codes of activations also `[E, N, 1]`, in memory
    `[E, columns, N]`. Words `[E, N, row_words(K)]` of 4 bits."""
    group: int = 0
    """Inputs that share a word of codes of 4 bits (int4_weights.py); 0: other weights."""
    bias: torch.Tensor | None = None
    """`[E, N]`."""
    has_tiles: bool = False
    """Whether 128 x 128 weights share a scale; of codes in blocks, without a bias. N is a multiple
    of 256, K of 128."""

    def num_sums(self, dtype: torch.dtype) -> int:
        """See int4_weights.py; 1 of other weights. dtype: of x."""
        return (
            num_sums(self.scales, self.group, dtype)
            if self.scales is not None and self.group
            else 1
        )


@with_kernel("grouped_gemm.tiled_gate_up_silu")
def gate_up_silu(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    code_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """SwiGLU of each assignment's token by its expert, `[P, I]` in sorted order.

    Args:
        x: `[T, H]`, contiguous: of the model's type, or with code_scales float8_e4m3fn.
        weights: N is 2 * I, gates first; K is H.
        rows: the assignments.
        input_weights: `[T, k]` float32, factors of the tokens before the projection, which then has
            no bias.
        limit: of gpt-oss's SwiGLU, `(up + 1) * gate * sigmoid(1.702 * gate)`, where gates are at
            most the limit, and ups at least its negative, too; None: `up * gate * sigmoid(gate)`.
        code_scales: `[1, T]` of rows or `[ceil(H / 128), T]` of blocks, float32, any stride between
            blocks.
        dtype: of the output of codes.
    """
    output = x.new_empty(len(rows.order), weights.weight.shape[1] // 2, dtype=dtype or x.dtype)
    for expert, first, end in hit_experts(rows):
        assignments = rows.order[first:end]
        tokens = assignments // rows.top_k
        gate_up = _product(x, tokens, weights, expert, code_scales)
        if input_weights is not None:
            gate_up = gate_up.mul_(input_weights.flatten()[assignments, None])
        output[first:end] = _swiglu(gate_up, limit)
    return output


def _swiglu(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """float32 `[T, I]` of `[T, 2 * I]`."""
    gate, up = gate_up.float().chunk(2, -1)
    if limit is None:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (GATE_SLOPE * gate).sigmoid()


def tiled_gate_up_silu(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    code_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernel of `gate_up_silu`."""
    output = x.new_empty(len(rows.order), weights.weight.shape[1] // 2, dtype=dtype or x.dtype)
    _launch(x, weights, rows, output, code_scales, input_weights, limit, gated=True)
    return output


@with_kernel("grouped_gemm.tiled_down")
def down(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    *,
    code_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The linear layer of each row's expert, `[P, H]` in the order of the assignments.

    Args:
        x: `[P, I]` in sorted order, contiguous: of the model's type, or with code_scales
            float8_e4m3fn.
        weights: N is H, K is I.
        rows: the assignments.
        code_scales: as of `gate_up_silu`, of the P rows.
        dtype: of the output of codes.
    """
    output = x.new_empty(len(rows.order), weights.weight.shape[1], dtype=dtype or x.dtype)
    for expert, first, end in hit_experts(rows):
        own = torch.arange(first, end, device=x.device)
        product = _product(x, own, weights, expert, code_scales)
        output[rows.order[first:end]] = product.to(output.dtype)
    return output


def tiled_down(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    *,
    code_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernel of `down`."""
    output = x.new_empty(len(rows.order), weights.weight.shape[1], dtype=dtype or x.dtype)
    _launch(x, weights, rows, output, code_scales, None, None, gated=False)
    return output


def _launch(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    output: torch.Tensor,
    code_scales: torch.Tensor | None,
    input_weights: torch.Tensor | None,
    limit: float | None,
    *,
    gated: bool,
) -> None:
    from tllm_spec.kernels.grouped_gemm_triton import grouped_gemm_kernel

    weight, scales, bias = weights.weight, weights.scales, weights.bias
    form = _checked_form(x, weights, code_scales)
    tilings = tilings_of(rows.block_rows, output.dtype, form, shared_memory_bytes(x.device))
    tiling = tilings.gate_up if gated else tilings.down
    assert tiling.rows == rows.block_rows and (input_weights is None or bias is None)
    room, features = rows.blocks.shape[1], output.shape[1]
    if not room:
        return
    tiles = -(-features // (tiling.outputs // 2 if gated else tiling.outputs))
    if form == "tiles" and tiling.rows == MOST_ROWS[form]:
        assert code_scales is not None and input_weights is None and limit is None
        _launch_tiles(x, code_scales, weights, rows, output, tiling, room * tiles, gated=gated)
        return
    grouped_gemm_kernel[(room * tiles,)](
        *(x, code_scales, 0 if code_scales is None else code_scales.stride(0), weight),
        *(None if scales is None else kernel_words(scales), bias, input_weights, output),
        *(rows.order, rows.blocks, rows.num_blocks, room, x.shape[1]),
        IN=x.shape[1],
        OUT=features,
        TOP_K=rows.top_k,
        GATED=gated,
        LIMIT=limit,
        SLOPE=GATE_SLOPE,
        GROUP=weights.group,
        X_BLOCKS=code_scales is not None and len(code_scales) > 1,
        W_BLOCKS=scales is not None and scales.shape[2] > 1,
        WIDEN=x.device.type == "cpu",  # the interpreter multiplies neither bfloat16 nor FP8
        ADDED=inputs_added(output.dtype),
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=tiling.inputs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **programmatic_launch(x.device),
    )


def _launch_tiles(
    x: torch.Tensor,
    code_scales: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    output: torch.Tensor,
    tiling: Tiling,
    num_programs: int,
    *,
    gated: bool,
) -> None:
    from tllm_spec.kernels.grouped_gemm_triton import grouped_tiles_kernel

    assert output.shape[1] % (BLOCK if gated else 2 * BLOCK) == 0 == x.shape[1] % BLOCK
    assert tiling.outputs == 2 * BLOCK and tiling.inputs == BLOCK
    grouped_tiles_kernel[(num_programs,)](
        *(x, code_scales, code_scales.stride(0), weights.weight, weights.scales, output),
        *(rows.order, rows.blocks, rows.num_blocks, rows.blocks.shape[1], x.shape[1]),
        IN=x.shape[1],
        OUT=output.shape[1],
        TOP_K=rows.top_k,
        GATED=gated,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply FP8
        ADDED=inputs_added(output.dtype),
        BLOCK_ROWS=tiling.rows,
        TILE=BLOCK,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **programmatic_launch(x.device),
    )


def _checked_form(
    x: torch.Tensor, weights: ExpertWeights, code_scales: torch.Tensor | None
) -> Form:
    """Asserts what the kernel needs."""
    weight, scales, inputs = weights.weight, weights.scales, x.shape[1]
    assert x.is_contiguous() and weight.is_contiguous()
    assert weights.bias is None or weights.bias.is_contiguous()
    if scales is None:
        return "plain"
    if weights.group:
        check_int4(weight, scales, weights.group, inputs)
        return "mxfp4" if is_exact(scales, x.dtype) else "int4"
    if code_scales is None:
        check_scaled(weight, scales)
        return "fp8"
    num_blocks = -(-inputs // BLOCK)
    assert weight.dtype == x.dtype == torch.float8_e4m3fn and weight.shape[2] == inputs
    assert scales.dtype == code_scales.dtype == torch.float32
    assert scales.shape[2] in (1, num_blocks) and scales.transpose(1, 2).is_contiguous()
    assert len(code_scales) in (1, num_blocks)
    assert code_scales.shape[1] == len(x) and (code_scales.stride(1) == 1 or len(x) <= 1)
    if weights.has_tiles:
        assert len(code_scales) == scales.shape[2] == num_blocks and weights.bias is None
        return "tiles"
    return "codes" if len(code_scales) == scales.shape[2] == 1 else "blocks"


def _product(
    x: torch.Tensor,
    own: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    code_scales: torch.Tensor | None,
) -> torch.Tensor:
    """The rows `own` of x times the expert's weight, plus the bias; of quantised weights in
    float32."""
    weight, group, x = weights.weight[expert], weights.group, x[own]
    scales = None if weights.scales is None else weights.scales[expert]
    if scales is None:
        product = x.mm(weight.t())
    elif group:
        codes = unpacked(weight, x.shape[1])
        product = x.float().mm(int4_dequantised(codes, scales, group, torch.float32).t())
    elif code_scales is None:
        product = x.float().mm(dequantised(weight, scales, torch.float32).t())
    else:
        product = fp8_linear.reference(x, code_scales[:, own], weight, scales, torch.float32)
    return product if weights.bias is None else product + weights.bias[expert]


def hit_experts(rows: ExpertRows) -> Iterator[tuple[int, int, int]]:
    """Expert, first sorted row and end of every block. Waits for the device."""
    for expert, first, end in rows.blocks[:, : int(rows.num_blocks)].t().tolist():
        yield expert, first, min(first + rows.block_rows, end)
