"""Acceptance of a chain of drafts: how many draft tokens equal the target's tokens at their
positions. Plain torch; a part of the reference of `slot_windows`' kernel."""

import torch


def accept_chain(
    targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor | None
) -> torch.Tensor:
    """Emitted tokens per request: accepted drafts plus the target's own, `[B]` int64.

    targets `[B, K+1]`: the target's token after each window position; drafts `[B, K]`; num_drafts
    `[B]`: how many of the drafts were proposed (None: all). The emitted tokens are
    `targets[b, :new_lens[b]]`, because an accepted draft equals the target's token."""
    matches = targets[:, :-1] == drafts
    if num_drafts is not None:
        matches &= torch.arange(drafts.shape[1], device=drafts.device) < num_drafts.unsqueeze(1)
    return matches.cumprod(dim=1).sum(dim=1) + 1


def accept_by_rates(
    targets: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    rates: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic acceptance by chance. Returns the emitted tokens `[B, K+1]` (accepted drafts, then
    the target's token) and their numbers `[B]`.

    rates `[>= K]` float64: rate i is the probability that drafts 0..i are all accepted; rates do
    not rise. coins `[B]` float64 in (0, 1), one per round: draft i is accepted if the coin is below
    rate i."""
    length = drafts.shape[1]
    accepted = torch.minimum((coins.unsqueeze(1) < rates[:length]).sum(dim=1), num_drafts)
    is_draft = torch.arange(length, device=drafts.device) < accepted.unsqueeze(1)
    tokens = torch.cat((torch.where(is_draft, drafts, targets[:, :-1]), targets[:, -1:]), dim=1)
    return tokens, accepted + 1
