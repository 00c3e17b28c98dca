"""Input of a draft head's first layer: the embedding and the hidden state side by side, normed or
not, the residual stream, and the rows of the rotary table.

`draft_input` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tllm_spec.kernels.rms_norm import plain_rms_norm
from tllm_spec.kernels.rotary_write import Rotary
from tllm_spec.kernels.triton_support import has_kernels


@dataclass(frozen=True)
class DraftInputNorms:
    """RMSNorm of the embedding and of the hidden state; weights `[H]`."""

    embedding: torch.Tensor
    hidden: torch.Tensor
    eps: float


@dataclass(frozen=True)
class DraftInput:
    """For T rows, R of which are wanted."""

    both: torch.Tensor
    """`[T, 2 H]`: the embedding, then the hidden state, both normed if there are norms."""
    total: torch.Tensor
    """`[R, H]`: a copy of the wanted hidden states."""
    rotary: Rotary
    """The given one with gathered rows."""


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
    if not has_kernels(hidden.device):
        return plain_draft_input(token_ids, table, hidden, norms, rotary, wanted)
    from tllm_spec.kernels.draft_input_triton import draft_input_triton

    weights = (None, None) if norms is None else (norms.embedding, norms.hidden)
    eps = 0.0 if norms is None else norms.eps
    both, total, cos_sin = draft_input_triton(
        token_ids, table, hidden, weights, eps, rotary, wanted
    )
    return DraftInput(both, total, replace(rotary, gathered=cos_sin))


def plain_draft_input(
    token_ids: torch.Tensor | None,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: DraftInputNorms | None,
    rotary: Rotary,
    wanted: torch.Tensor | None = None,
) -> DraftInput:
    """Reference of `draft_input`. `Rotary` gathers its rows on demand."""
    embedded, state = table if token_ids is None else F.embedding(token_ids, table), hidden
    if norms is not None:
        embedded = plain_rms_norm(embedded, norms.embedding, norms.eps)
        state = plain_rms_norm(hidden, norms.hidden, norms.eps)
    both = torch.cat((embedded, state), -1)
    return DraftInput(
        both, hidden.clone() if wanted is None else hidden.index_select(0, wanted), rotary
    )
