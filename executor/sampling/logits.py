"""Edits of logits before temperature (penalties, min_tokens), and the distribution of a greedy row.
Pure functions over rows.

Every row is one position of one request and is treated as if it were decoded alone. Nothing here
knows requests, windows or acceptance."""

import torch

from tllm_spec.kernels.choose_token import choose_best


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """logits, output_counts, in_prompt (bool): `[R, V]`; the three penalties: `[R, 1]`. Returns
    `[R, V]`.

    Repetition (Keskar et al., CTRL) counts prompt and output; it divides positive logits and
    multiplies negative ones. Presence and frequency count the output and are subtracted."""
    seen = output_counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen | in_prompt, scaled, logits)
    return logits - presence * seen - frequency * output_counts


def mask_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, too_early: torch.Tensor) -> None:
    """Excludes the stop ids, in place, in rows before min_tokens: `too_early` `[R]`. stop_ids
    `[R, E]` are padded by repetition; a negative first id means that the row has none."""
    blocked = too_early.unsqueeze(1) & (stop_ids >= 0)
    ids = stop_ids.clamp_min(0)
    logits.scatter_(1, ids, logits.gather(1, ids).masked_fill(blocked, -torch.inf))


def one_hot_of_best(logits: torch.Tensor) -> torch.Tensor:
    """`[R, V]` float32: all mass on the best token; NaN where no token can be chosen."""
    best = choose_best(logits)
    probs = torch.zeros_like(logits, dtype=torch.float32)
    probs.scatter_(1, best.clamp_min(0).unsqueeze(1), 1.0)
    return probs.masked_fill_((best < 0).unsqueeze(1), torch.nan)
