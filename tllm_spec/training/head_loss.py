"""Loss and validation of an EAGLE-3 or P-EAGLE head: every step of its chains of drafts is compared
with the target's distribution.

An EAGLE-3 head is trained on its own outputs, as in drafting ("training-time test" of the EAGLE-3
paper, arXiv 2503.01840): a chain of `unroll` steps along the text starts at every position."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.training.eagle3 import DraftHead, target_states
from tllm_spec.training.language_model import ARGMAX_SHARE

STEP_DECAY = 0.9
"""Ratio of a step's weight in the loss to the previous step's: a late draft matters only if the
earlier ones were right."""
ALIGNMENT = 8
"""The number of chains of a sequence is a multiple of this, so that GEMMs use the tensor cores."""


class Labels(NamedTuple):
    """The labels at positions of a text, in the head's vocabulary."""

    wanted: Tensor
    """`[..., D]`: weights of the draft tokens' log probabilities in the loss."""
    floor: Tensor
    """`[...]`: the constant that makes the KL part of a perfect head zero."""
    best: Tensor
    """`[...]`: the target's best token, in the target's ids."""


def labels(target_logits: Tensor, draft_ids: Tensor) -> Labels:
    """From logits `[..., V]`. With p the target's distribution, D the draft vocabulary and
    a = ARGMAX_SHARE, a position's loss is

        (1 - a) * sum over D of p(v) * (log p(v)/p(D) - log draft(v))  +  a * (-log draft(best))

    The first part is the KL of the renormalised p, weighted by p(D): tokens outside D do not
    contribute. The second part is zero if the target's best token is outside D."""
    best, logits = target_logits.argmax(-1), target_logits.float()
    restricted = logits[..., draft_ids]
    wanted = (restricted - logits.logsumexp(-1, keepdim=True)).exp_()  # p so far
    floor = (wanted * restricted.log_softmax(-1)).sum(-1)
    is_best = draft_ids == best.unsqueeze(-1)
    wanted.mul_(1 - ARGMAX_SHARE).add_(is_best, alpha=ARGMAX_SHARE)
    return Labels(wanted, (1 - ARGMAX_SHARE) * floor, best)


def step_states(
    head: DraftHead, target: Any, features: Tensor, tokens: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What `head.logits` reads at steps 0..unroll-1 along the text, `[B, n, H]`, and for each of
    the n rows the index `[n]`, on the CPU, of the target's logits that predict the same token.

    `features` `[B, T, 3H]` and `tokens` `[B, T]` are of the same text. The chains are those that
    end within it; chain s predicts the token at `s + k + 2` at step k. In training a third of a
    P-EAGLE head's chains, drawn by chance, goes on after the first step, as there are many."""
    embed, mask_token = target.get_input_embeddings(), head.config.mask_token
    embeddings, count = embed(tokens), features.shape[1] - unroll
    chains = torch.arange(count)
    starts, caches = to_device(chains, features.device), None
    inputs: tuple[Tensor, ...] = head.fuse(features[:, :count]), embeddings[:, 1 : 1 + count]
    for step in range(unroll):
        hidden, caches = head(*inputs, starts, caches)
        yield hidden, chains + step + 1
        if mask_token is None:
            inputs = hidden, embeddings[:, step + 2 : step + 2 + count]
        elif step == 0:
            if head.training:
                chains = torch.randperm(count)[: max(1, count // 3 // ALIGNMENT) * ALIGNMENT]
            starts = to_device(chains, features.device)
            masks = head.fuse(head.mask_hidden), embed(tokens.new_tensor(mask_token))
            inputs = tuple(each.expand(len(tokens), len(chains), -1) for each in masks)


class Batch(NamedTuple):
    """Sequences of a step of training."""

    tokens: Tensor
    """`[b, T]`, of this rank."""
    counts: Tensor
    """`[B, T]` bool, of all ranks, on the CPU: whether the target's choice after the token is
    trained."""
    share: slice = slice(None)
    """This rank's rows of all B."""
    states: tuple[Tensor, Tensor] | None = None
    """`[b, T, 3H]` and, after the final norm, `[b, T, H]` of the target; None: it runs."""

    @classmethod
    def whole(cls, tokens: Tensor, unroll: int) -> "Batch":
        """All of `[B, T]` tokens, but for a few at the end where the chains are not aligned."""
        tokens = tokens[:, : aligned_chains(tokens.shape[1], unroll) + unroll]
        return cls(tokens, torch.ones(tokens.shape, dtype=torch.bool))


class Step(NamedTuple):
    """One step of the chains of a text; rows as in `step_states`."""

    losses: Tensor
    """`[M]`: of the `[B, n]` rows that count, in their order."""
    is_best: Tensor
    """`[M]`: whether the head's best token is the target's."""
    rows: Tensor
    """`[n]`."""


def steps_along(
    head: DraftHead,
    target: Any,
    tokens: Tensor,
    unroll: int,
    states: tuple[Tensor, Tensor] | None = None,
    counts: Tensor | None = None,
) -> Iterator[Step]:
    """Every step of the chains along `[B, T]` tokens. GEMMs are in the target's type. states: as in
    `Batch`; counts: of these tokens, None: all. Logits are computed of what counts only."""
    device, is_bf16 = tokens.device, target.dtype == torch.bfloat16
    counted = torch.ones(tokens.numel(), dtype=torch.bool) if counts is None else counts.flatten()
    number_of = counted.cumsum(0) - 1  # of a token, among those that count
    first = torch.arange(len(tokens)).unsqueeze(1) * tokens.shape[1]
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
        with torch.no_grad():
            if states is None:
                features, target_logits = target_states(target, tokens, head.config.capture_layers)
            else:
                features, target_logits = states[0], target.get_output_embeddings()(states[1])
            chosen = to_device(counted.nonzero().squeeze(1), device)
            goal = labels(target_logits.flatten(0, 1)[chosen], head.draft_ids)
        for hidden, rows in step_states(head, target, features, tokens, unroll):
            predicting = (first + rows).flatten()
            own = counted[predicting].nonzero().squeeze(1)
            logits = head.logits(hidden.flatten(0, 1)[to_device(own, device)])
            numbers = to_device(number_of[predicting[own]], device)
            wanted, floor, best = (part[numbers] for part in goal)
            log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
            losses = floor - (wanted * log_probs).sum(-1)
            yield Step(losses, head.draft_ids[logits.argmax(-1)] == best, rows)


def unrolled(head: DraftHead, target: Any, batch: Batch, unroll: int) -> tuple[Tensor, Tensor]:
    """Loss and agreement with the target's best tokens, each `[unroll]`: this rank's part of the
    mean over the batch. The ranks' parts add up to the mean."""
    losses, agreements = [], []
    own = batch.counts[batch.share]
    for step in steps_along(head, target, batch.tokens, unroll, batch.states, own):
        number = max(1, int(batch.counts[:, step.rows].sum()))
        losses.append(step.losses.sum() / number)
        agreements.append(step.is_best.sum() / number)
    return torch.stack(losses), torch.stack(agreements)


def aligned_chains(length: int, unroll: int) -> int:
    """The number of chains of a sequence of `length` tokens. Raises ValueError if it is 0."""
    chains = (length - unroll) // ALIGNMENT * ALIGNMENT
    if chains < 1:
        raise ValueError(
            f"--length is {length}; with --unroll {unroll} it must be {unroll + ALIGNMENT} or more"
        )
    return chains


def weighted(losses: Tensor) -> Tensor:
    """The mean of `[unroll]` losses with weights 1, STEP_DECAY, STEP_DECAY^2, ..."""
    weights = STEP_DECAY ** torch.arange(len(losses), device=losses.device)
    return (weights * losses).sum() / weights.sum()


def head_figures(head: DraftHead, target: Any, unroll: int, tokens: Tensor) -> dict[str, Tensor]:
    """The loss along `[B, T]` tokens, and `agreement` `[unroll]`: how often each draft is the
    target's best token."""
    losses, agreements = unrolled(head, target, Batch.whole(tokens, unroll), unroll)
    return {"loss": weighted(losses), "agreement": agreements}
