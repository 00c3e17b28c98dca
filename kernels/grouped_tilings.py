"""How the grouped GEMMs of grouped_gemm.py are tiled, by the form of the weights."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.shared_memory import HOPPER_BYTES, rows_that_fit, stages_that_fit
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
