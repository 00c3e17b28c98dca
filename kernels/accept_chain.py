"""Chain acceptance: how many of a request's draft tokens equal the tokens that the target chose at their positions.

This file is the plain-torch twin. It knows nothing of how the target chose.
"""

import torch


def accept_chain(
    targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor | None
) -> torch.Tensor:
    """Emitted tokens per request: accepted drafts plus the target's own, `[B]` int64.

    targets `[B, K+1]`: the target's token after each window position; drafts `[B, K]`; num_drafts `[B]`: how many of
    the drafts were really proposed (None: all). The emitted run is then `targets[b, :new_lens[b]]`, because an accepted
    draft equals the target's token.
    """
    matches = targets[:, :-1] == drafts
    if num_drafts is not None:
        matches &= torch.arange(drafts.shape[1], device=drafts.device) < num_drafts.unsqueeze(1)
    return matches.cumprod(dim=1).sum(dim=1) + 1
