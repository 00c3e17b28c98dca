"""A second reading of the sampling rules: one position at a time, in float64, from a model's raw logits.

It shares with the engine nothing but the noise, so an equal text says that both read the rules alike.
"""

from typing import Any

import torch

from tllm_spec.kernels.gumbel import gumbel_noise
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
        """How far the worse of two candidates for the token after `output` lies below the best perturbed logit."""
        perturbed = perturbed_logits(self.logits(prompt + output)[-1], params, prompt, output)
        return float(perturbed.max() - perturbed[list(tokens)].min())


def perturbed_logits(
    raw: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """What the token after `output` is the argmax of, `[V]` float64. raw `[V]`. `ignore_eos` is taken for granted."""
    logits = _edited(raw, params, prompt, output)
    if params.is_greedy:
        return logits
    logits = _filtered(logits / params.effective_temperature, params)
    assert params.seed is not None
    seed, position = torch.tensor([params.seed]), torch.tensor([len(prompt) + len(output)])
    return logits + gumbel_noise(seed, position, len(raw))[0]


def _edited(raw: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
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
