"""The token of every row: argmax of logits / temperature + Gumbel noise, or plain argmax where the temperature is 0.

One call is the whole choice of DESIGN section 5 for rows without filters. Rows that were already scaled and filtered
come with temperature 1, which changes nothing (x / 1 = x). On CUDA it is one fused Triton kernel (and a small one to
reduce its parts), elsewhere the plain-torch twin, which is its definition.

This file knows nothing of requests, windows or acceptance.
"""

import torch

from tllm_spec.kernels.gumbel import TARGET_DOMAIN, gumbel_noise


def choose_token(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    domain: int = TARGET_DOMAIN,
) -> torch.Tensor:
    """logits `[R, V]` float32, temperature `[R]` float32, seeds and positions `[R]` int64. Returns `[R]` int64.

    Equal values, infinite ones too, go to the lowest token id. -1 where the row holds a NaN or nothing but -inf.
    """
    if not logits.is_cuda:
        return choose_token_twin(logits, temperature, seeds, positions, domain)
    from tllm_spec.kernels.choose_token_triton import choose_token_triton

    return choose_token_triton(logits, temperature, seeds, positions, domain)


def choose_token_twin(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    domain: int = TARGET_DOMAIN,
) -> torch.Tensor:
    """Arguments and result of `choose_token`. A division and an addition in float32, each rounded once."""
    greedy = (temperature == 0).unsqueeze(1)
    noise = gumbel_noise(seeds, positions, logits.shape[1], domain)
    values = torch.where(greedy, logits, logits / temperature.unsqueeze(1) + noise)
    # torch.max documents the first index for ties, and a NaN for rows that hold one.
    best, tokens = values.max(dim=-1)
    return torch.where(best > -torch.inf, tokens, -1)
