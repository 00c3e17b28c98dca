"""What happens to logits between the model and the choice of a token. Pure functions over rows.

Every row is one position of one request and is treated as if it were decoded alone. Nothing here knows requests,
windows or acceptance.
"""

import torch

from tllm_spec.kernels.choose_token import choose_token


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """logits, output_counts, in_prompt (bool): `[R, V]`; the three penalties: `[R, 1]`. Returns `[R, V]`.

    Repetition (Keskar et al., CTRL) looks at prompt and output, and divides positive logits and multiplies negative
    ones; presence and frequency look at the output and are subtracted.
    """
    seen = output_counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen | in_prompt, scaled, logits)
    return logits - presence * seen - frequency * output_counts


def mask_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, too_early: torch.Tensor) -> None:
    """In place: rows of `too_early` `[R]` (before min_tokens) may not choose a stop id. stop_ids: `[R, E]`, padded by
    repetition; a negative first id means that the row has none."""
    blocked = too_early.unsqueeze(1) & (stop_ids >= 0)
    ids = stop_ids.clamp_min(0)
    logits.scatter_(1, ids, logits.gather(1, ids).masked_fill(blocked, -torch.inf))


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Sets what min_p, then top_k, then top_p exclude to -inf. logits (temperature applied): `[R, V]`; the parameters:
    `[R, 1]`, with V, 1 and 0 meaning off. The most likely token always stays. Returns `[R, V]`.

    top_p keeps the smallest set of tokens, most likely first, whose probability reaches it. Tokens that tie with the
    last kept one are kept as well, so the result does not depend on a sorting order.
    """
    descending = logits.sort(dim=-1, descending=True).values
    floor = torch.where(min_p > 0, descending[:, :1] + min_p.log(), -torch.inf)
    floor = torch.maximum(floor, descending.gather(1, top_k - 1))
    kept = torch.where(descending < floor, -torch.inf, descending).softmax(dim=-1)
    before = kept.cumsum(dim=-1) - kept
    last_kept = ((before < top_p).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    floor = torch.where(top_p < 1, torch.maximum(floor, descending.gather(1, last_kept)), floor)
    return logits.masked_fill(logits < floor, -torch.inf)


def choose(logits: torch.Tensor) -> torch.Tensor:
    """The index of the largest entry of each row, `[R]`; -1 where the row holds a NaN or nothing but -inf."""
    if logits.is_cuda:  # torch.max takes three times as long for the few rows of a round
        nothing = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return choose_token(logits, nothing.to(torch.float32), nothing, nothing)
    values, tokens = logits.max(dim=-1)
    return torch.where(values > -torch.inf, tokens, -1)
