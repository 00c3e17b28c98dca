"""Loss and validation of an EAGLE-3 or P-EAGLE head: every step of its chains of drafts is compared
with the target's distribution.

An EAGLE-3 head is trained on its own outputs, as in drafting ("training-time test" of the EAGLE-3
paper, arXiv 2503.01840): a chain of `unroll` steps along the text starts at every position."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.training.eagle3 import Eagle3Head, FeatureHead, PEagleHead, Rows, target_states
from tllm_spec.training.language_model import (
    ARGMAX_SHARE,
    VALIDATION_LENGTH,
    VALIDATION_WINDOWS,
    TokenData,
    mixed,
)

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
    head: FeatureHead, target: Any, features: Tensor, tokens: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """What `head.logits` reads at steps 0..unroll-1 along the text, `[B, n, H]`, and for each of
    the n rows the index `[n]`, on the CPU, of the target's logits that predict the same token.

    `features` `[B, T, 3H]` and `tokens` `[B, T]` are of the same text."""
    embed = target.get_input_embeddings()
    if isinstance(head, PEagleHead):
        mask = embed(tokens.new_tensor(head.config.mask_token))
        yield from mask_states(head, features, embed(tokens), mask, unroll)
        return
    assert isinstance(head, Eagle3Head)
    for step, hidden in enumerate(chain_states(head, features, embed(tokens), unroll)):
        yield hidden, torch.arange(step + 1, step + 1 + hidden.shape[1])


def mask_states(
    head: PEagleHead, features: Tensor, embeddings: Tensor, mask_embedding: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """See `step_states`. In training mask rows follow a third of the positions, drawn by chance, as
    there are many of them; otherwise all."""
    num_pairs = features.shape[1] - unroll
    if head.training:
        num_anchors = max(1, num_pairs // 3 // ALIGNMENT) * ALIGNMENT
        chosen = torch.randperm(num_pairs)[:num_anchors]
    else:
        chosen = torch.arange(num_pairs)
    rows = Rows.of(num_pairs, to_device(chosen, features.device), unroll - 1)
    pairs = features[:, :num_pairs], embeddings[:, 1 : 1 + num_pairs]
    hidden = torch.split(head(*pairs, mask_embedding, rows), rows.sizes, 1)
    places = [torch.arange(num_pairs), *(chosen + step for step in range(1, unroll))]
    yield from zip(hidden, (each + 1 for each in places), strict=True)


def chain_states(
    head: Eagle3Head, features: Tensor, embeddings: Tensor, unroll: int
) -> Iterator[Tensor]:
    """What `head.logits` reads at steps 0..unroll-1 along the text, for all chains that end within
    it.

    `features` `[B, T, 3H]` and `embeddings` `[B, T, H]` are of the same tokens; each result is
    `[B, T - unroll, H]`. Row s of step k predicts the token at `s + k + 2`, as the target's logits
    at `s + k + 1` do."""
    chains = features.shape[1] - unroll
    hidden, caches = head.fuse(features[:, :chains]), None
    for step in range(unroll):
        hidden, caches = head(hidden, embeddings[:, step + 1 : step + 1 + chains], caches)
        yield hidden


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
    head: FeatureHead,
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


def unrolled(head: FeatureHead, target: Any, batch: Batch, unroll: int) -> tuple[Tensor, Tensor]:
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


def eagle3_loss(
    head: FeatureHead, target: Any, data: TokenData, self_text: TokenData, unroll: int
) -> Callable[[int, int], Tensor]:
    """The loss of `mixed` sequences."""

    def loss(windows: int, length: int) -> Tensor:
        tokens = mixed(data, self_text, windows, length)
        return weighted(unrolled(head, target, Batch.whole(tokens, unroll), unroll)[0])

    return loss


def eagle3_validation(
    head: FeatureHead, target: Any, heldout: TokenData, unroll: int
) -> Callable[[], dict[str, float]]:
    """`agreement_k`: how often draft k along held-out text is the target's best token."""

    def validate() -> dict[str, float]:
        figures = [
            torch.stack(unrolled(head, target, Batch.whole(tokens, unroll), unroll))
            for tokens in heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS)
        ]
        losses, agreements = torch.stack(figures).mean(0)
        return {"loss": weighted(losses).item()} | {
            f"agreement_{draft}": rate for draft, rate in enumerate(agreements.tolist(), start=1)
        }

    return validate
