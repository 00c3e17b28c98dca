"""Chooses the token of each row: argmax of logits / temperature + Gumbel noise, or plain argmax
where the temperature is 0.

Logits have the model's dtype and become float32 in registers, so no float32 copy of the logits is
written. Filters are given as one number per row (`filter_cut`). On CUDA this is one fused Triton
kernel and a small one that reduces its parts; elsewhere the plain-torch reference, which is the
definition."""

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.gumbel import TARGET_DOMAIN, gumbel_noise


@with_kernel("choose_token_triton.choose_token_triton")
def choose_token(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    domain: int = TARGET_DOMAIN,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits `[R, V]` float32, bfloat16 or float16; temperature `[R]` float32; seeds and positions
    `[R]` int64; cut `[R]` float32: values of logits / temperature below it count as -inf in rows
    with a temperature. Returns `[R]` int64.

    Ties, infinite values included, go to the lowest token id. -1 where the row holds a NaN or only
    -inf."""
    return _choose(
        logits, temperature, gumbel_noise(seeds, positions, logits.shape[1], domain), cut
    )


@with_kernel("choose_token_triton.choose_best_triton")
def choose_best(logits: torch.Tensor) -> torch.Tensor:
    """`choose_token` where every temperature is 0."""
    best, tokens = logits.max(dim=-1)
    return torch.where(best > -torch.inf, tokens, -1)


@with_kernel("choose_token_triton.choose_draft_triton")
def choose_draft(
    logits: torch.Tensor,
    token_map: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """`choose_token` for a draft model, or `choose_best` without a temperature. token_map `[V]`
    int64: the target's id of each column, which keys the noise and is returned; None: the column
    itself.

    Ties go to the first column. Rows with a NaN or only -inf give column 0, so a draft is always a
    valid token."""
    if temperature is None:
        columns = choose_best.reference(logits)
    else:
        assert seeds is not None and positions is not None
        num_tokens = logits.shape[1] if token_map is None else int(token_map.max()) + 1
        noise = gumbel_noise(seeds, positions, num_tokens)
        if token_map is not None:
            noise = noise.index_select(1, token_map)
        columns = _choose(logits, temperature, noise, cut)
    columns = columns.clamp_min(0)
    return columns if token_map is None else token_map.index_select(0, columns)


@with_kernel("choose_token_triton.offer_token_triton")
def offer_token(
    logits: torch.Tensor,
    first: int,
    ids: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best value and its column of some columns of the logits, from `first` on: `[R, 2]` int32,
    the value as the bits of a float32. As `choose_token`, or `choose_best` without a temperature.
    ids `[V]` int64: token ids of the columns, which key the noise.

    Column -1 with +inf where the row holds a NaN, and with -inf where it holds only that."""
    values = logits.to(torch.float32)
    if temperature is not None:
        assert ids is not None and seeds is not None and positions is not None
        noise = gumbel_noise(seeds, positions, int(ids.max()) + 1).index_select(1, ids)
        drawn = values / temperature.unsqueeze(1) + noise
        values = torch.where((temperature == 0).unsqueeze(1), values, drawn)
    best, columns = values.max(dim=-1)
    columns = torch.where(best > -torch.inf, columns + first, -1)
    bits = best.nan_to_num(torch.inf, torch.inf, -torch.inf).view(torch.int32)
    return torch.stack((bits, columns.to(torch.int32)), 1)


def _choose(
    logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor, cut: torch.Tensor | None
) -> torch.Tensor:
    """One float32 division and one float32 addition, each rounded once."""
    logits = logits.to(torch.float32)
    scaled = logits / temperature.unsqueeze(1)
    if cut is not None:
        scaled = scaled.masked_fill(scaled < cut.unsqueeze(1), -torch.inf)
    return choose_best.reference(
        torch.where((temperature == 0).unsqueeze(1), logits, scaled + noise)
    )
