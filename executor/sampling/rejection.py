"""Classical speculative sampling: accept a draft with probability min(1, p / q), otherwise draw
from the normalised (p - q)+.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1.
It is lossless in distribution. Unlike with the default rule, the text for a seed depends on the
drafter."""

import torch

from tllm_spec.kernels.choose_token import choose_best
from tllm_spec.kernels.gumbel import COIN_DOMAIN, RESIDUAL_DOMAIN, gumbel_noise, uniform


def reject_chain(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emitted tokens `[N, K+1]` and how many of them are valid `[N]`.

    target_probs `[N, K+1, V]`. draft_probs `[N, K, V]`: the distributions that drafts `[N, K]` were
    drawn from; None: each draft was certain. num_drafts `[N]`: proposed drafts, the rest is
    padding; None: all. seeds `[N]`; positions `[N, K+1]`."""
    num, length = drafts.shape
    accepted = torch.zeros(num, dtype=torch.int64, device=drafts.device)
    if length:
        p = target_probs[:, :length].gather(2, drafts.unsqueeze(2)).squeeze(2)
        q = 1.0 if draft_probs is None else draft_probs.gather(2, drafts.unsqueeze(2)).squeeze(2)
        coins = uniform(
            seeds.repeat_interleave(length), positions[:, :length].flatten(), COIN_DOMAIN
        )
        wins = coins.view(num, length) * q < p
        if num_drafts is not None:
            wins &= torch.arange(length, device=drafts.device) < num_drafts.unsqueeze(1)
        accepted = wins.cumprod(dim=1).sum(dim=1)
    final = target_probs.gather(
        1, accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    ).squeeze(1)
    if length:
        final = torch.where(
            _was_rejected(accepted, num_drafts, length).unsqueeze(1),
            (final - _proposal_at(accepted, draft_probs, drafts, final)).clamp_min(0),
            final,
        )
    position = positions.gather(1, accepted.unsqueeze(1)).squeeze(1)
    last = choose_best(final.log() + gumbel_noise(seeds, position, final.shape[1], RESIDUAL_DOMAIN))
    tokens = torch.cat((drafts, last.unsqueeze(1)), dim=1).scatter_(
        1, accepted.unsqueeze(1), last.unsqueeze(1)
    )
    return tokens, accepted + 1


def _was_rejected(
    accepted: torch.Tensor, num_drafts: torch.Tensor | None, length: int
) -> torch.Tensor:
    """Whether the first position that was not accepted had a proposed draft, `[N]` bool."""
    return accepted < (length if num_drafts is None else num_drafts)


def _proposal_at(
    accepted: torch.Tensor,
    draft_probs: torch.Tensor | None,
    drafts: torch.Tensor,
    like: torch.Tensor,
) -> torch.Tensor:
    """The draft distribution at the first rejected position, `[N, V]`; undefined where nothing was
    rejected."""
    index = accepted.clamp_max(drafts.shape[1] - 1).unsqueeze(1)
    if draft_probs is None:
        return torch.zeros_like(like).scatter_(1, drafts.gather(1, index), 1.0)
    return draft_probs.gather(1, index.unsqueeze(2).expand(-1, -1, draft_probs.shape[2])).squeeze(1)
