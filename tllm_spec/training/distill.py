"""Training losses: next-token cross entropy for the target, distillation from it for the draft."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tllm_spec.training.language_model import logits_of
from tllm_spec.training.token_data import TokenData

ARGMAX_SHARE = 0.3
"""Weight of the cross entropy on the target's best token in the draft's loss; the rest is KL."""
SELF_TEXT_SHARE = 0.5
VALIDATION_WINDOWS = 16
VALIDATION_LENGTH = 1024


def target_loss(model: Any, data: TokenData) -> Callable[[int, int], Tensor]:
    def loss(windows: int, length: int) -> Tensor:
        tokens = data.sample(windows, length + 1)
        return cross_entropy(logits_of(model, tokens[:, :-1]), tokens[:, 1:])

    return loss


def target_validation(model: Any, heldout: TokenData) -> Callable[[], dict[str, float]]:
    def validate() -> dict[str, float]:
        losses = [
            cross_entropy(logits_of(model, tokens[:, :-1]), tokens[:, 1:])
            for tokens in heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS)
        ]
        nats = torch.stack(losses).mean().item()
        return {"loss": nats, "bits_per_byte": bits_per_byte(nats, heldout)}

    return validate


def draft_loss(
    draft: Any, target: Any, data: TokenData, self_text: TokenData
) -> Callable[[int, int], Tensor]:
    """The loss of `mixed` sequences."""

    def loss(windows: int, length: int) -> Tensor:
        tokens = mixed(data, self_text, windows, length)
        with torch.no_grad():
            target_logits = logits_of(target, tokens)
        return distillation_loss(logits_of(draft, tokens), target_logits)

    return loss


def mixed(data: TokenData, self_text: TokenData, windows: int, length: int) -> Tensor:
    """`[windows, length]`: sequences of the training files and of text that the target wrote."""
    own = int(windows * SELF_TEXT_SHARE)
    return torch.cat([data.sample(windows - own, length), self_text.sample(own, length)])


def draft_validation(draft: Any, target: Any, heldout: TokenData) -> Callable[[], dict[str, float]]:
    """`agreement`: how often both models have the same best token on held-out text."""

    def validate() -> dict[str, float]:
        figures = []
        for tokens in heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS):
            draft_logits, target_logits = logits_of(draft, tokens), logits_of(target, tokens)
            agreement = (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()
            nats = cross_entropy(draft_logits[:, :-1], tokens[:, 1:])
            figures.append(
                torch.stack([distillation_loss(draft_logits, target_logits), agreement, nats])
            )
        loss, agreement_rate, nats_per_token = torch.stack(figures).mean(0).tolist()
        return {"loss": loss, "agreement": agreement_rate, "nats_per_token": nats_per_token}

    return validate


def distillation_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Both `[B, T, V]`. Forward KL(target || draft) is for acceptance at T > 0, cross entropy on
    the target's best token is for greedy acceptance."""
    draft = F.log_softmax(draft_logits.float(), -1).flatten(0, 1)
    target = F.log_softmax(target_logits.float(), -1).flatten(0, 1)
    divergence = F.kl_div(draft, target, reduction="batchmean", log_target=True)
    best = F.nll_loss(draft, target.argmax(-1))
    return (1 - ARGMAX_SHARE) * divergence + ARGMAX_SHARE * best


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean nats a token of `[B, T, V]` logits for `[B, T]` labels."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def bits_per_byte(nats_per_token: float, data: TokenData) -> float:
    return nats_per_token / math.log(2) * len(data.tokens) / data.num_bytes
