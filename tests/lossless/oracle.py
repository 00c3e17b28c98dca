"""A second reading of the sampling rules: one position at a time, in float64, from a model's raw
logits.

It shares with the engine nothing but the noise, so an equal text says that both read the rules
alike."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tllm_spec.kernels.sampling.gumbel import gumbel_noise
from tllm_spec.sampling_params import SamplingParams


class Oracle:
    """`model` is transformers' own; its logits of a whole text come from one forward."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Raw logits after every token, `[T, V]` float32."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits
        return logits[0]

    def gap(
        self, params: SamplingParams, prompt: list[int], output: list[int], tokens: tuple[int, int]
    ) -> float:
        """How far the worse of two candidates for the token after `output` lies below the best
        perturbed logit."""
        perturbed = perturbed_logits(self.logits(prompt + output)[-1], params, prompt, output)
        return float(perturbed.max() - perturbed[list(tokens)].min())

    def gap_with_edges(
        self, params: SamplingParams, prompt: list[int], output: list[int], tokens: tuple[int, int]
    ) -> float:
        """By how much differences of logits (over the temperature) have to be off for either of two
        candidates to be the token after `output`, if only because a filter decides otherwise about
        one."""
        if params.is_greedy:
            return self.gap(params, prompt, output, tokens)
        logits = _edited(self.logits(prompt + output)[-1], params, prompt, output)
        scaled = logits / params.effective_temperature
        perturbed = scaled + _noise(params, len(prompt) + len(output), len(logits))
        margins = filter_margins(scaled, params)
        return max(distance(token, perturbed, margins) for token in tokens)


def perturbed_logits(
    raw: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """What the token after `output` is the argmax of, `[V]` float64. raw `[V]`. `ignore_eos` is
    taken for granted."""
    logits = _edited(raw, params, prompt, output)
    if params.is_greedy:
        return logits
    return _filtered(logits / params.effective_temperature, params) + _noise(
        params, len(prompt) + len(output), len(raw)
    )


def filter_margins(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """By how much differences of logits `[V]` (over the temperature) have to be off for min_p,
    top_k or top_p to decide
    otherwise about each token: not below 0 where all three keep it. For top_p either the odds of
    what is likelier than a token against the rest are off, which are so by as much as the logits,
    or its place among its neighbours is."""
    order = logits.sort(descending=True)
    margins = torch.full_like(logits, torch.inf)
    if params.min_p:
        gaps = logits - logits.max()
        margins = torch.where(gaps == 0, torch.inf, gaps - math.log(params.min_p))
    kept = margins >= 0
    if params.top_k and params.top_k < len(logits):
        margins = torch.minimum(
            margins, _from_edge(logits, logits >= order.values[params.top_k - 1])
        )
        kept &= logits >= order.values[params.top_k - 1]
    if params.top_p is not None and params.top_p < 1:
        probs = logits.masked_fill(~kept, -torch.inf).softmax(0)
        before = torch.empty_like(probs)
        before[order.indices] = probs[order.indices].cumsum(0) - probs[order.indices]
        odds = torch.tensor(params.top_p, dtype=torch.float64).logit() - before.clamp(0, 1).logit()
        inside = _from_edge(logits, kept & (odds > 0))
        nearer = torch.where(odds > 0, torch.minimum(odds, inside), torch.maximum(odds, inside))
        margins = torch.minimum(margins, nearer)
    return margins


def _from_edge(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """How far above the greatest that is not kept, or (below 0) below the least that is."""
    outside = logits[~kept].max() if not kept.all() else -torch.inf
    return torch.where(kept, logits - outside, logits - logits[kept].min())


def distance(token: int, perturbed: torch.Tensor, margins: torch.Tensor) -> float:
    """By how much differences of logits have to be off for the token to be kept by the filters, and
    for each better one that is kept to be excluded or overtaken."""
    rivals = (margins >= 0) & (perturbed > perturbed[token])
    ways = torch.minimum(perturbed - perturbed[token], margins)[rivals]
    return max(0.0, -float(margins[token]), *ways.tolist())


def _noise(params: SamplingParams, position: int, vocab_size: int) -> torch.Tensor:
    assert params.seed is not None
    return gumbel_noise(torch.tensor([params.seed]), torch.tensor([position]), vocab_size)[0]


def _edited(
    raw: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    values: list[float] = raw.tolist()
    for token in set(prompt + output):
        values[token] *= params.repetition_penalty ** (-1 if values[token] > 0 else 1)
    for token in output:
        values[token] -= params.frequency_penalty
    for token in set(output):
        values[token] -= params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in params.stop_token_ids or ():
        values[token] = values[token] if len(output) >= params.min_tokens else -torch.inf
    text = prompt + output
    for *before, last in params.bad_sequences:
        if text[len(text) - len(before) :] == before:
            values[last] = -torch.inf
    logits = torch.tensor(values, dtype=torch.float64)
    for processor in params.logits_processors:
        logits = processor(text, logits)
    return logits


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """min_p, then top_k, then top_p on what is left; the most probable tokens come first."""
    probs: list[float] = logits.softmax(0).tolist()
    order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)
    kept = [token for token in order if probs[token] >= (params.min_p or 0) * probs[order[0]]]
    kept = kept[: params.top_k or None]
    total, reached, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += probs[token] / total
        if reached >= (1 if params.top_p is None else params.top_p):
            break
    filtered = torch.full_like(logits, -torch.inf)
    filtered[nucleus] = logits[nucleus]
    return filtered


GetOracle = Callable[[], Oracle]  # loads the model when it is first called
