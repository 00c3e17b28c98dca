"""The two linear layers of a mixture of experts, each one GEMM per expert that is hit: gate and up
projections with SwiGLU, and the down projection. A Triton kernel if Triton is available, otherwise
the plain-torch reference, which loops over the experts.

Weights of an expert that no token takes are not read. Sums are float32 and rounded once. Weights
may be FP8, with scales as in scaled_linear.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.moe_permute import ExpertRows
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear import BLOCK, check_scaled, dequantised
from tllm_spec.kernels.shared_memory import HOPPER_BYTES, shared_memory_bytes, stages_that_fit
from tllm_spec.kernels.silu_and_mul import silu_and_mul
from tllm_spec.kernels.triton_support import has_kernels


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


# By the most rows per expert, on average. Few rows stream weights: tiles are small, so that one
# token fills the device, and two programs share a multiprocessor. One stage of the pipeline is
# being multiplied and one was, so the others are in flight: 48 KiB of weights per program. A
# program of the down projection has fewer inputs, so it takes more outputs.
TILINGS = (
    (8, Tilings(Tiling(16, 64, 128, 4, 5), Tiling(16, 128, 64, 4, 5))),
    (24, Tilings(Tiling(32, 64, 128, 4, 4), Tiling(32, 128, 64, 4, 4))),
    (64, Tilings(Tiling(64, 128, 64, 4, 4), Tiling(64, 128, 64, 4, 4))),
)
LARGE = Tilings(Tiling(128, 256, 64, 8, 4), Tiling(128, 256, 64, 8, 4))
FLOAT32 = Tilings(Tiling(16, 64, 32, 4, 2), Tiling(16, 64, 32, 4, 2))  # no tensor cores
# Tiles for FP8 weights by the same rows: a block of inputs at a time. Three or four programs with
# small tiles share a multiprocessor, each with 32 KiB of weights in flight.
SCALED_OF_ROWS = {
    16: Tiling(16, 64, BLOCK, 4, 5),
    32: Tiling(32, 64, BLOCK, 4, 5),
    64: Tiling(64, 128, BLOCK, 8, 4),
    128: Tiling(128, 128, BLOCK, 8, 4),
}
SCALED_FLOAT32 = Tiling(16, 64, BLOCK, 4, 2)


def tilings_of(
    num_assignments: int,
    num_experts: int,
    dtype: torch.dtype,
    scaled: bool = False,
    shared_bytes: int = HOPPER_BYTES,
) -> Tilings:
    """For `num_assignments` rows of all experts together. scaled: of FP8 weights; shared_bytes:
    that a program may have (shared_memory.py), which changes no number of rows."""
    if dtype == torch.float32:
        return Tilings(SCALED_FLOAT32, SCALED_FLOAT32) if scaled else FLOAT32
    found = next(
        (tilings for rows, tilings in TILINGS if num_assignments <= rows * num_experts), LARGE
    )
    if scaled:
        own = SCALED_OF_ROWS[found.gate_up.rows]
        found = Tilings(own, own)
    if shared_bytes >= HOPPER_BYTES:
        return found
    own_bytes = 1 if scaled else 2  # of a weight
    return Tilings(
        *(_fitting(each, own_bytes, shared_bytes) for each in (found.gate_up, found.down))
    )


def _fitting(tiling: Tiling, weight_bytes: int, shared_bytes: int) -> Tiling:
    """The tiling with as many stages as fit."""
    stage_bytes = tiling.inputs * (weight_bytes * tiling.outputs + 2 * tiling.rows)
    number = stages_that_fit(tiling.num_stages, stage_bytes, shared_bytes)
    return replace(tiling, num_stages=number)


def block_rows_of(
    num_assignments: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The block size for `moe_permute`: a program's rows, or for the reference all rows."""
    if not has_kernels(device):
        return max(num_assignments, 1)
    return tilings_of(num_assignments, num_experts, dtype).gate_up.rows


@with_kernel("grouped_gemm.tiled_gate_up_silu")
def gate_up_silu(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU of each assignment's token by its expert, `[P, I]` in sorted order.

    Args:
        x: `[T, H]`, contiguous.
        weight: `[E, 2 * I, H]`, contiguous, gates first, of the type of x, or FP8 with scales.
        rows: the assignments.
        input_weights: `[T, k]` float32, factors of the tokens before the projection.
        scales: `[E, 2 * I, ceil(H / 128)]` float32, contiguous.
    """
    output = x.new_empty(len(rows.order), weight.shape[1] // 2)
    for expert, first, end in hit_experts(rows):
        assignments = rows.order[first:end]
        gate_up = _product(x[assignments // rows.top_k], weight, scales, expert)
        if input_weights is not None:
            gate_up = gate_up.mul_(input_weights.flatten()[assignments, None])
        output[first:end] = silu_and_mul.reference(gate_up)
    return output


def tiled_gate_up_silu(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    input_weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `gate_up_silu`."""
    output = x.new_empty(len(rows.order), weight.shape[1] // 2)
    _launch(x, weight, scales, rows, output, gated=True, input_weights=input_weights)
    return output


@with_kernel("grouped_gemm.tiled_down")
def down(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The linear layer of each row's expert, `[P, H]` in the order of the assignments.

    Args:
        x: `[P, I]` in sorted order, contiguous.
        weight: `[E, H, I]`, contiguous, of the type of x, or FP8 with scales.
        rows: the assignments.
        scales: `[E, H, ceil(I / 128)]` float32, contiguous.
    """
    output = x.new_empty(len(rows.order), weight.shape[1])
    for expert, first, end in hit_experts(rows):
        product = _product(x[first:end], weight, scales, expert)
        output[rows.order[first:end]] = product.to(x.dtype)
    return output


def tiled_down(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `down`."""
    output = x.new_empty(len(rows.order), weight.shape[1])
    _launch(x, weight, scales, rows, output, gated=False, input_weights=None)
    return output


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    rows: ExpertRows,
    output: torch.Tensor,
    *,
    gated: bool,
    input_weights: torch.Tensor | None,
) -> None:
    from tllm_spec.kernels.grouped_gemm_triton import grouped_gemm_kernel

    if scales is not None:
        check_scaled(weight, scales)
    tilings = tilings_of(
        len(rows.order),
        weight.shape[0],
        x.dtype,
        scales is not None,
        shared_memory_bytes(x.device),
    )
    tiling = tilings.gate_up if gated else tilings.down
    assert x.is_contiguous() and weight.is_contiguous() and tiling.rows == rows.block_rows
    room, features = rows.blocks.shape[1], output.shape[1]
    if not room:
        return
    tiles = -(-features // (tiling.outputs // 2 if gated else tiling.outputs))
    grouped_gemm_kernel[(room * tiles,)](
        x,
        weight,
        scales,
        input_weights,
        output,
        rows.order,
        rows.blocks,
        rows.num_blocks,
        room,
        x.shape[1],
        IN=x.shape[1],
        OUT=features,
        TOP_K=rows.top_k,
        GATED=gated,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=tiling.inputs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **programmatic_launch(x.device),
    )


def _product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """x times the expert's weight; of an FP8 weight in float32."""
    if scales is None:
        return x.mm(weight[expert].t())
    return x.float().mm(dequantised(weight[expert], scales[expert], torch.float32).t())


def hit_experts(rows: ExpertRows) -> Iterator[tuple[int, int, int]]:
    """Expert, first sorted row and end of every block. Waits for the device."""
    for expert, first, end in rows.blocks[:, : int(rows.num_blocks)].t().tolist():
        yield expert, first, min(first + rows.block_rows, end)
