"""Input of a draft head's first layer: the embedding and the hidden state side by side, normed or
not, the residual stream, and the rows of the rotary table.

`draft_input` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.rms_norm import rms_norm
from tllm_spec.kernels.rotary_write import Rotary


@dataclass(frozen=True)
class DraftInputNorms:
    """RMSNorm of the embedding and of the hidden state; weights `[H]`."""

    embedding: torch.Tensor
    hidden: torch.Tensor
    eps: float


@dataclass(frozen=True)
class DraftInput:
    """The inputs of a draft head for T rows, R of which are wanted."""

    both: torch.Tensor
    """`[T, 2 H]`: the embedding, then the hidden state, both normed if there are norms."""
    total: torch.Tensor
    """`[R, H]`: a copy of the wanted hidden states."""
    rotary: Rotary
    """The given one with gathered rows."""


@with_kernel("draft_input_triton.draft_input_triton", argument=2)
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
        state = rms_norm.reference(hidden, norms.hidden, norms.eps)
    both = torch.cat((embedded, state), -1)
    return DraftInput(
        both, hidden.clone() if wanted is None else hidden.index_select(0, wanted), rotary
    )
