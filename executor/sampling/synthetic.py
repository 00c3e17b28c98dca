"""Synthetic acceptance: so many drafts are accepted as given rates say, whatever the tokens are. For benchmarks with
dummy weights only: the text means nothing.
"""

import torch

from tllm_spec.kernels.gumbel import COIN_DOMAIN, uniform


class SyntheticAcceptance:
    """`rates`: entry i is the probability that drafts 0..i of a round are all accepted."""

    def __init__(self, rates: tuple[float, ...], device: torch.device) -> None:
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)

    def accept(
        self,
        targets: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Emitted tokens `[B, K+1]` and their numbers `[B]`: drafts as far as they are accepted, then the target's
        token.

        targets `[B, K+1]`; drafts `[B, K]`; num_drafts `[B]`: how many are real (None: K = 0); seeds, positions `[B]`
        of the first token.
        """
        length = drafts.shape[1]
        if num_drafts is None:
            return targets, torch.ones_like(seeds)
        # One coin for the whole round: draft i is accepted when the coin is below its rate, and rates do not rise.
        coins = uniform(seeds, positions, COIN_DOMAIN).unsqueeze(1)
        accepted = torch.minimum((coins < self._rates[:length]).sum(dim=1), num_drafts)
        is_draft = torch.arange(length, device=drafts.device) < accepted.unsqueeze(1)
        tokens = torch.cat((torch.where(is_draft, drafts, targets[:, :-1]), targets[:, -1:]), dim=1)
        return tokens, accepted + 1
