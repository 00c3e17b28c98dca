"""The two linear layers of a mixture of experts, each one GEMM per expert that is hit: gate and up
projections with SwiGLU, and the down projection. A Triton kernel if Triton is available, otherwise
the plain-torch reference, which loops over the experts.

Weights of an expert that no token takes are not read. Sums are float32 and rounded once. Weights
may be FP8 or have 4 bits, as in scaled_linear.py, and with FP8 weights activations may be codes, as
in fp8_linear.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tllm_spec.kernels.dispatch import has_kernels, with_kernel
from tllm_spec.kernels.experts.grouped_mxfp4 import grouped_mxfp4, serves_mxfp4
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.fp8_linear import fp8_linear, inputs_added
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK
from tllm_spec.kernels.gemm.int4_weights import (
    check_int4,
    int4_dequantised,
    is_exact,
    kernel_words,
    num_sums,
    unpacked,
)
from tllm_spec.kernels.gemm.norms import Activation, silu_and_mul
from tllm_spec.kernels.gemm.scaled_linear import check_scaled, dequantised
from tllm_spec.kernels.launch import (
    HOPPER_BYTES,
    programmatic_launch,
    rows_that_fit,
    shared_memory_bytes,
    stages_that_fit,
)

# How the grouped GEMMs of grouped_gemm.py are tiled, by the form of the weights.


@dataclass(frozen=True)
class Tiling:
    """A program computes `outputs` outputs of up to `rows` rows of one expert, `inputs` inputs at a
    time. `outputs` of a gated layer are half gates, half ups."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tilings:
    """How both layers are tiled, with the same number of rows."""

    gate_up: Tiling
    down: Tiling


Form = Literal["plain", "fp8", "codes", "blocks", "tiles", "int4", "mxfp4"]
"""Weights of the type of x; in FP8; in FP8 for codes of activations, with scales of rows, of blocks
of inputs, and of blocks where 128 x 128 weights share one; of 4 bits, and of those that are exact
in the type of x."""
# Rows of a block by the most rows per expert, on average; and with more, by form.
ROWS = ((8, 16), (24, 32), (64, 64))
MOST_ROWS: dict[Form, int] = {
    "plain": 128,
    "fp8": 128,
    "codes": 128,
    "blocks": 64,
    "tiles": 128,
    "int4": 128,
    "mxfp4": 128,
}
FLOAT32_ROWS = 16


def _alike(rows: int, outputs: int, num_warps: int, num_stages: int) -> Tilings:
    """Both layers of quantised weights have one tiling, a block of inputs at a time."""
    tiling = Tiling(rows, outputs, BLOCK, num_warps, num_stages)
    return Tilings(tiling, tiling)


_INT4 = {rows: _alike(rows, 64, 4, 3) for rows in (16, 32, 64, 128)}
_FEW_CODES = {16: _alike(16, 64, 4, 4), 32: _alike(32, 64, 4, 4)}
# By rows. Few rows stream weights: tiles are small, so that one token fills the device, and two
# programs share a multiprocessor. One stage of the pipeline is being multiplied and one was, so the
# others are in flight: 48 KiB of weights per program. A program of the down projection has fewer
# inputs, so it takes more outputs. Three or four programs with small tiles of FP8 share a
# multiprocessor, each with 32 KiB of weights in flight.
TILINGS: dict[Form, dict[int, Tilings]] = {
    "plain": {
        16: Tilings(Tiling(16, 64, 128, 4, 5), Tiling(16, 128, 64, 4, 5)),
        32: Tilings(Tiling(32, 64, 128, 4, 4), Tiling(32, 128, 64, 4, 4)),
        64: Tilings(Tiling(64, 128, 64, 4, 4), Tiling(64, 128, 64, 4, 4)),
        128: Tilings(Tiling(128, 256, 64, 8, 4), Tiling(128, 256, 64, 8, 4)),
    },
    "fp8": {
        16: _alike(16, 64, 4, 5),
        32: _alike(32, 64, 4, 5),
        64: _alike(64, 128, 8, 4),
        128: _alike(128, 128, 8, 4),
    },
    "codes": _FEW_CODES | {64: _alike(64, 128, 4, 4), 128: _alike(128, 256, 8, 3)},
    "blocks": _FEW_CODES | {64: _alike(64, 128, 4, 3)},
    "tiles": _FEW_CODES | {64: _alike(64, 128, 4, 3), 128: _alike(128, 256, 8, 4)},
    "int4": _INT4,
    "mxfp4": _INT4 | {128: _alike(128, 128, 4, 2)},
}
# No tensor cores.
FLOAT32 = Tilings(Tiling(16, 64, 32, 4, 2), Tiling(16, 64, 32, 4, 2))
QUANTISED_FLOAT32 = _alike(FLOAT32_ROWS, 64, 4, 2)
# Bits of a weight, and bytes of an activation.
_SIZES: dict[Form, tuple[int, int]] = {
    "plain": (16, 2),
    "fp8": (8, 2),
    "codes": (8, 1),
    "blocks": (8, 1),
    "tiles": (8, 1),
    "int4": (4, 2),
    "mxfp4": (4, 2),
}


def block_rows_of(
    num_assignments: int,
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device,
    form: Form = "plain",
    num_sums: int = 1,
) -> int:
    """The block size for `moe_permute`: a program's rows, or for the reference all rows. dtype: of
    the layers' outputs; form: of their weights; num_sums: of weights of 4 bits, see
    int4_weights.py."""
    if not has_kernels(device):
        return max(num_assignments, 1)
    if dtype == torch.float32:
        return FLOAT32_ROWS
    found = (rows for most, rows in ROWS if num_assignments <= most * num_experts)
    rows = next(found, MOST_ROWS[form])
    return rows_that_fit(rows, num_sums, device) if form == "int4" else rows


def tilings_of(
    block_rows: int, dtype: torch.dtype, form: Form, shared_bytes: int = HOPPER_BYTES
) -> Tilings:
    """The tilings for blocks of so many rows. dtype: of the layers' outputs; shared_bytes: that a
    program may have (shared_memory.py)."""
    if dtype == torch.float32:
        return FLOAT32 if form == "plain" else QUANTISED_FLOAT32
    found = TILINGS[form][block_rows]
    if shared_bytes >= HOPPER_BYTES:
        return found
    return Tilings(*(_fitting(each, form, shared_bytes) for each in (found.gate_up, found.down)))


def _fitting(tiling: Tiling, form: Form, shared_bytes: int) -> Tiling:
    """The tiling with as many stages as fit."""
    bits, row_bytes = _SIZES[form]
    stage_bytes = tiling.inputs * (bits * tiling.outputs // 8 + row_bytes * tiling.rows)
    number = stages_that_fit(tiling.num_stages, stage_bytes, shared_bytes)
    return replace(tiling, num_stages=number)


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


@with_kernel("tiled_gate_up_silu")
def gate_up_silu(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    activation: Activation = "silu",
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
        activation: of the gates without a limit; another one than SiLU makes it GeGLU.
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
        output[first:end] = swiglu(gate_up, limit, activation)
    return output


def swiglu(gate_up: torch.Tensor, limit: float | None, activation: Activation) -> torch.Tensor:
    """float32 `[T, I]` of `[T, 2 * I]`."""
    if limit is None:
        return silu_and_mul.reference(gate_up.float(), activation)
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * (GATE_SLOPE * gate).sigmoid()


def tiled_gate_up_silu(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    activation: Activation = "silu",
    code_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernel of `gate_up_silu`."""
    output = x.new_empty(len(rows.order), weights.weight.shape[1] // 2, dtype=dtype or x.dtype)
    gates = limit, activation
    _launch(x, weights, rows, output, code_scales, input_weights, *gates, gated=True)
    return output


@with_kernel("tiled_down")
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
    _launch(x, weights, rows, output, code_scales, None, None, "silu", gated=False)
    return output


def _launch(
    x: torch.Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    output: torch.Tensor,
    code_scales: torch.Tensor | None,
    input_weights: torch.Tensor | None,
    limit: float | None,
    activation: Activation,
    *,
    gated: bool,
) -> None:
    from tllm_spec.kernels.experts.grouped_gemm_triton import grouped_gemm_kernel

    weight, scales, bias = weights.weight, weights.scales, weights.bias
    form = _checked_form(x, weights, code_scales)
    tilings = tilings_of(rows.block_rows, output.dtype, form, shared_memory_bytes(x.device))
    tiling = tilings.gate_up if gated else tilings.down
    assert tiling.rows == rows.block_rows and (input_weights is None or bias is None)
    room, features = rows.blocks.shape[1], output.shape[1]
    if not room:
        return
    is_plain = input_weights is None and activation == "silu"
    if form == "mxfp4" and is_plain and serves_mxfp4(x, weight, rows, gated):
        assert scales is not None
        slope = 1.0 if limit is None else GATE_SLOPE
        grouped_mxfp4(x, weight, scales, bias, rows, output, limit, slope, gated=gated)
        return
    tiles = -(-features // (tiling.outputs // 2 if gated else tiling.outputs))
    if form == "tiles" and tiling.rows == MOST_ROWS[form]:
        assert code_scales is not None and input_weights is None and limit is None
        assert activation == "silu"
        _launch_tiles(x, code_scales, weights, rows, output, tiling, room * tiles, gated=gated)
        return
    grouped_gemm_kernel[(room * tiles,)](
        *(x, code_scales, 0 if code_scales is None else code_scales.stride(0), weight),
        *(None if scales is None else kernel_words(scales), bias, input_weights, output),
        *(rows.order, rows.blocks, rows.num_blocks, room, x.shape[1]),
        IN=x.shape[1],
        OUT=features,
        TOP_K=rows.top_k,
        IS_SORTED=rows.is_sorted,
        GATED=gated,
        LIMIT=limit,
        IS_GELU=activation != "silu",
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
    from tllm_spec.kernels.experts.grouped_gemm_triton import grouped_tiles_kernel

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
