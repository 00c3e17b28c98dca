"""Input of a draft head's first layer: the embedding and the hidden state side by side, normed or
not, the residual stream, and the rows of the rotary table.

`draft_input` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.norms import norm_row, rms_norm
from tllm_spec.kernels.launch import begin, programmatic_launch, strided
from tllm_spec.kernels.slots.row_copies import copy_part


@dataclass(frozen=True)
class DraftInputNorms:
    """RMSNorm of the embedding and of the hidden state; weights `[H]`."""

    embedding: torch.Tensor
    hidden: torch.Tensor
    eps: float
    hides_first: bool = False
    """Whether the embedding at position 0 is zeros."""


@dataclass(frozen=True)
class DraftInput:
    """The inputs of a draft head for T rows, R of which are wanted."""

    both: torch.Tensor
    """`[T, 2 H]`: the embedding, then the hidden state, both normed if there are norms."""
    total: torch.Tensor
    """`[R, H]`: a copy of the wanted hidden states."""
    rotary: Rotary
    """The given one with gathered rows."""


@with_kernel("draft_input_triton", argument=2)
def draft_input(
    token_ids: torch.Tensor | None,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: DraftInputNorms | None,
    rotary: Rotary,
    wanted: torch.Tensor | None = None,
) -> DraftInput:
    """Batch-invariant: a row depends on its own token and hidden state only.

    Args:
        token_ids: `[T]` int64, all of them valid (those of padding rows, too); None: row t's
            embedding is the table's row t.
        table: `[V, H]`, or `[T, H]` without ids, of hidden's dtype, contiguous.
        hidden: `[T, H]`, any stride between rows; not changed.
        norms: computed in float32, rounded once (`rms_norm`); None: no norms.
        rotary: of the T rows.
        wanted: `[R]` int64, R <= T; None: all rows.
    """
    embedded, state = table if token_ids is None else F.embedding(token_ids, table), hidden
    if norms is not None:
        embedded = rms_norm.reference(embedded, norms.embedding, norms.eps)
        if norms.hides_first:
            embedded = embedded.masked_fill((rotary.positions == 0).unsqueeze(1), 0)
        state = rms_norm.reference(hidden, norms.hidden, norms.eps)
    both = torch.cat((embedded, state), -1)
    return DraftInput(
        both, hidden.clone() if wanted is None else hidden.index_select(0, wanted), rotary
    )


# One launch instead of an embedding, two norms, a concatenation, a copy and a gather, with
# programmatic dependent launch, which torch's ops do not have. The norms take the steps of
# rms_norm_triton.py.
#
# Elements moved: 4 T H + 2 R H + 4 T D and the weights; 49 KiB per row with H = 4096 and D = 128
# in bfloat16.


_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread
_PARTS = 4  # programs per row: embedding, hidden state, copy, rotary


def draft_input_triton(
    token_ids: torch.Tensor | None,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: DraftInputNorms | None,
    rotary: Rotary,
    wanted: torch.Tensor | None = None,
) -> DraftInput:
    """See `draft_input`."""
    (num_rows, size), num_wanted = hidden.shape, len(hidden if wanted is None else wanted)
    assert table.is_contiguous() and (hidden.stride(1) == 1 or size == 1)
    assert len(table) == num_rows if token_ids is None else token_ids.is_contiguous()
    assert num_wanted <= num_rows and table.dtype == hidden.dtype
    assert rotary.table.is_contiguous() and rotary.positions.is_contiguous()
    both, total = hidden.new_empty(num_rows, 2 * size), hidden.new_empty(num_wanted, size)
    cos_sin = rotary.table.new_empty(num_rows, *rotary.table.shape[1:])
    block = triton.next_power_of_2(size)
    draft_input_kernel[(num_rows, _PARTS)](
        token_ids,
        table,
        *strided(hidden),
        *((None, None) if norms is None else (norms.embedding, norms.hidden)),
        wanted,
        rotary.table,
        rotary.positions,
        both,
        total,
        cos_sin,
        num_wanted,
        0.0 if norms is None else norms.eps,
        SIZE=size,
        ROTARY_SIZE=cos_sin.stride(0),
        HIDES_FIRST=norms is not None and norms.hides_first,
        BLOCK=block,
        ROTARY_BLOCK=triton.next_power_of_2(cos_sin.stride(0)),
        **programmatic_launch(hidden.device),
        num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
    )
    return DraftInput(both, total, replace(rotary, gathered=cos_sin))


@triton.jit(do_not_specialize=["num_wanted"])
def draft_input_kernel(
    token_ids: tl.tensor, table: tl.tensor, hidden: tl.tensor, hidden_stride: tl.tensor,
    embedding_weight: tl.tensor, hidden_weight: tl.tensor, wanted: tl.tensor, rotary: tl.tensor,
    positions: tl.tensor, both: tl.tensor, total: tl.tensor, cos_sin: tl.tensor,
    num_wanted: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr,
    HIDES_FIRST: tl.constexpr, BLOCK: tl.constexpr, ROTARY_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts of a row)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        if token_ids is None:
            token = row
        else:
            token = tl.load(token_ids + row)
        embedding, output = table + token * SIZE, both + row * 2 * SIZE
        if embedding_weight is None:
            copy_part(embedding, output, 0, SIZE, BLOCK)
        else:
            own = positions + row if HIDES_FIRST else None
            _norm(embedding, embedding_weight, own, output, eps, SIZE, BLOCK)
    elif part == 1:
        state, output = hidden + row * hidden_stride, both + (row * 2 + 1) * SIZE
        if hidden_weight is None:
            copy_part(state, output, 0, SIZE, BLOCK)
        else:
            _norm(state, hidden_weight, None, output, eps, SIZE, BLOCK)
    elif part == 2:
        if row < num_wanted:
            if wanted is None:
                source = row
            else:
                source = tl.load(wanted + row)
            copy_part(hidden + source * hidden_stride, total + row * SIZE, 0, SIZE, BLOCK)
    else:
        source = rotary + tl.load(positions + row) * ROTARY_SIZE
        copy_part(source, cos_sin + row * ROTARY_SIZE, 0, ROTARY_SIZE, ROTARY_BLOCK)


@triton.jit
def _norm(
    x: tl.tensor, weight: tl.tensor, position: tl.tensor, output: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """RMSNorm of one row; zeros if there is a position and it is 0."""
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    normed = norm_row(x, weight, eps, columns, real, SIZE)
    if position is not None:
        normed = tl.where(tl.load(position) == 0, 0.0, normed)
    tl.store(output + columns, normed.to(output.dtype.element_ty), mask=real)
