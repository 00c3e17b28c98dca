"""How a draft model's token is drawn from its logits (DESIGN section 5).

`coupled`: with the noise that the target will use at the same position, so that the two agree whenever their
distributions nearly do. `greedy`: the best token. Rejection sampling draws with noise of its own and remembers the
distribution.
"""

import torch

from tllm_spec.executor.sampling.logits import choose
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.kernels.gumbel import DRAFT_DOMAIN, gumbel_noise


class DraftSampling:
    """Draws one draft token per request and step. Penalties, bias and masks are the target's business: a draft that
    ignores them is only accepted less often."""

    def __init__(self, sampler: Sampler, mode: str) -> None:
        self._sampler = sampler
        self._mode = mode  # coupled | greedy | independent
        self.keeps_probs = mode == "independent"

    def choose(
        self, group: RowGroup, step: int, logits: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens `[N]`, and what they were drawn from `[N, V]` where rejection sampling needs it.

        logits `[N, V_draft]`; first `[N]`: the position of the group's first draft; step counts from 0.
        """
        logits = logits[:, : self._sampler.state.vocab_size]  # ids beyond the target's cannot be accepted
        if self.keeps_probs:
            logits = (
                logits.nan_to_num()
            )  # a draft model's NaN is no fault of the request: drafts at random, then
        if group.sampled is None or self._mode == "greedy":
            tokens = choose(logits).clamp_min(0)
            return tokens, self._one_hot(tokens) if self.keeps_probs else None
        scaled = self._scaled(group, logits)
        noise = self._noise(group, step, first)[:, : logits.shape[1]]
        drawn = choose(scaled + noise)
        tokens = group.sampled.put_requests(choose(logits), drawn).clamp_min(0)
        if not self.keeps_probs:
            return tokens, None
        probs = torch.nn.functional.pad(
            scaled.softmax(-1), (0, self._sampler.state.vocab_size - logits.shape[1])
        )
        return tokens, group.sampled.put_requests(self._one_hot(tokens), probs)

    def _scaled(self, group: RowGroup, logits: torch.Tensor) -> torch.Tensor:
        assert group.sampled is not None and group.sampled_parameters is not None
        parameters = group.sampled_parameters.every(group.window)
        return self._sampler.scaled(group, group.sampled.take_requests(logits), parameters)

    def _noise(self, group: RowGroup, step: int, first: torch.Tensor) -> torch.Tensor:
        """`[M, V]` for the sampled requests."""
        assert group.sampled is not None and group.sampled_parameters is not None
        if not self.keeps_probs:
            noise = self._sampler.noise(group, first)
            return noise.view(-1, group.window, noise.shape[-1])[:, step]
        seeds = group.sampled_parameters.every(group.window).integer("seed")
        positions = group.sampled.take_requests(first) + step
        return gumbel_noise(seeds, positions, self._sampler.state.vocab_size, DRAFT_DOMAIN)

    def _one_hot(self, tokens: torch.Tensor) -> torch.Tensor:
        size = (len(tokens), self._sampler.state.vocab_size)
        return torch.zeros(size, device=tokens.device).scatter_(1, tokens.unsqueeze(1), 1.0)
