"""What the first layer of an EAGLE-3 head reads: the norm of a token's embedding beside the norm of
a hidden state, the running sum that the layer's output is added to, and the rows of the rotary
table.

`draft_input` is one Triton kernel where there is any and its plain-torch reference, which is the
definition, elsewhere. It knows neither layers nor drafting."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tllm_spec.kernels.rms_norm import plain_rms_norm
from tllm_spec.kernels.rotary_write import Rotary
from tllm_spec.kernels.triton_support import has_kernels


@dataclass(frozen=True)
class DraftInputNorms:
    """RMSNorm of the embedding and of the hidden state: weights `[H]`."""

    embedding: torch.Tensor
    hidden: torch.Tensor
    eps: float


@dataclass(frozen=True)
class DraftInput:
    """Of T rows, R of which are wanted."""

    both: torch.Tensor
    """`[T, 2 H]`, the normed embedding in the first half, the normed hidden state in the second."""
    total: torch.Tensor
    """`[R, H]`, a copy of the wanted hidden states."""
    rotary: Rotary
    """The one given, its rows gathered."""


def draft_input(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: DraftInputNorms,
    rotary: Rotary,
    wanted: torch.Tensor | None = None,
) -> DraftInput:
    """A row depends on its own token and hidden state only, to the last bit.

    Args:
        token_ids: `[T]` int64; rows of the table, all of them: rows that pad a window have some
        valid id, too.
        table: `[V, H]`, of hidden's dtype, contiguous.
        hidden: `[T, H]`, any stride between rows; it is not changed.
        norms: float32 inside, rounded once (`rms_norm`).
        rotary: of the T rows.
        wanted: `[R]` int64, R <= T; None: all.
    """
    if not has_kernels(hidden.device):
        return plain_draft_input(token_ids, table, hidden, norms, rotary, wanted)
    from tllm_spec.kernels.draft_input_triton import draft_input_triton

    weights = (norms.embedding, norms.hidden)
    both, total, turns = draft_input_triton(
        token_ids, table, hidden, weights, norms.eps, rotary, wanted
    )
    return DraftInput(both, total, replace(rotary, known=turns))


def plain_draft_input(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    norms: DraftInputNorms,
    rotary: Rotary,
    wanted: torch.Tensor | None = None,
) -> DraftInput:
    """The reference of `draft_input`. `Rotary` gathers its rows when it is asked for them."""
    embedded = plain_rms_norm(F.embedding(token_ids, table), norms.embedding, norms.eps)
    both = torch.cat((embedded, plain_rms_norm(hidden, norms.hidden, norms.eps)), -1)
    return DraftInput(
        both, hidden.clone() if wanted is None else hidden.index_select(0, wanted), rotary
    )
