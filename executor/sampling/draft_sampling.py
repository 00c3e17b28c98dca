"""How a draft model's token is drawn from its logits.

`coupled`: with the noise that the target will use at the same position, so that both choose the
same token whenever their distributions are close. `greedy`: the best token. `independent`: with
noise of its own, keeping the distribution for rejection sampling."""

import torch

from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.kernels.drafts.top_tokens import top_tokens
from tllm_spec.kernels.sampling.choose_token import choose_best, choose_draft
from tllm_spec.kernels.sampling.gumbel import DRAFT_DOMAIN, gumbel_noise


class DraftSampling:
    """Draws one draft token per request and step. Penalties, bias and masks are left to the target:
    a draft that ignores them is only accepted less often.

    `token_map` `[V_draft]`: the target's ids of a reduced draft vocabulary. None: the ids are the
    same, and ids beyond the target's vocabulary are never drawn."""

    def __init__(self, sampler: Sampler, mode: str, token_map: torch.Tensor | None = None) -> None:
        self._sampler = sampler
        self._mode = mode  # coupled | greedy | independent
        self._token_map = token_map
        self._vocab_size = sampler.state.vocab_size
        self.keeps_probs = mode == "independent"

    def width(self, vocab_size: int) -> int:
        """How many ids a draft model with `vocab_size` logits can draw."""
        return min(vocab_size, self._vocab_size)

    def choose(
        self, group: RowGroup, step: int, logits: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens `[N]`, and for rejection sampling the distributions that they were drawn
        from, `[N, width]`.

        logits `[N, V_draft]`; first `[N]`: the position of each request's first draft; step counts
        from 0. Kernels make noise for the draft's own ids only, and write no noise to memory."""
        logits, sampled = logits[:, : self._vocab_size], group.sampled
        if self.keeps_probs:
            return self._choose_with_probs(group, step, logits, first)
        if sampled is None or self._mode == "greedy":
            return choose_draft(logits, self._token_map), None
        parameters, rows = sampled.parameters.each_of(sampled.own), sampled.take_requests(logits)
        drawn = choose_draft(
            rows,
            self._token_map,
            parameters.column("temperature").squeeze(1),
            parameters.integer("seed"),
            sampled.take_requests(first) + step,
            self._sampler.cut(group, rows, parameters),
        )
        if sampled.requests is not None:
            drawn = sampled.put_requests(choose_draft(logits, self._token_map), drawn)
        return drawn, None

    def best(
        self, group: RowGroup, logits: torch.Tensor, positions: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `topk` best tokens of each row and their probabilities, `[N * n, topk]`, best first.

        logits `[N * n, V_draft]`: n rows for each request; positions `[N]`: of the tokens. Coupled
        drafts are the best by logits / temperature + noise."""
        logits, sampled = logits[:, : self._vocab_size], group.sampled
        if sampled is None or self._mode == "greedy":
            return top_tokens(logits, topk, self._token_map)
        each = len(logits) // len(group.slots)
        subset = sampled.with_rows(each)
        parameters, rows = subset.parameters, subset.take(logits)
        drawn = top_tokens(
            rows,
            topk,
            self._token_map,
            parameters.column("temperature").squeeze(1),
            parameters.integer("seed"),
            sampled.take_requests(positions),
            self._sampler.cut(group, rows, parameters.repeated(each)) if group.filtered else None,
        )
        if subset.rows is None:
            return drawn
        probs, tokens = top_tokens(logits, topk, self._token_map)
        return subset.put(probs, drawn[0]), subset.put(tokens, drawn[1])

    def _choose_with_probs(
        self, group: RowGroup, step: int, logits: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with noise of its own."""
        # A draft model's NaN must not fail the request: its drafts are random then.
        logits = logits.to(torch.float32).nan_to_num()
        if (sampled := group.sampled) is None:
            tokens = choose_best(logits).clamp_min(0)
            return self._target_ids(tokens), _one_hot(tokens, logits)
        parameters = sampled.parameters.each_of(sampled.own)
        temperature, seeds = parameters.column("temperature"), parameters.integer("seed")
        scaled = self._sampler.scaled(group, sampled.take_requests(logits), parameters)
        positions = sampled.take_requests(first + step)
        noise = gumbel_noise(seeds, positions, self._vocab_size, DRAFT_DOMAIN)
        if group.mixed:
            noise = noise * (temperature > 0)
        if self._token_map is not None:
            noise = noise.index_select(1, self._token_map)
        drawn = choose_best(scaled + noise[:, : logits.shape[1]])
        tokens = sampled.put_requests(choose_best(logits), drawn).clamp_min(0)
        probs = sampled.put_requests(_one_hot(tokens, logits), scaled.softmax(-1))
        if group.mixed:
            probs = torch.where(temperature == 0, _one_hot(tokens, logits), probs)
        return self._target_ids(tokens), probs

    def spread(self, probs: torch.Tensor) -> torch.Tensor:
        """Distributions over the draft's ids `[..., width]` as distributions over the target's,
        `[..., V]`."""
        if self._token_map is None:
            return torch.nn.functional.pad(probs, (0, self._vocab_size - probs.shape[-1]))
        spread = probs.new_zeros((*probs.shape[:-1], self._vocab_size))
        return spread.index_copy_(-1, self._token_map, probs)

    def _target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._token_map is None else self._token_map.index_select(0, tokens)


def _one_hot(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).scatter_(1, tokens.unsqueeze(1), 1.0)
