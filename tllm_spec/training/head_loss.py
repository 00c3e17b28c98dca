"""Loss and validation of an EAGLE-3 or P-EAGLE head: every step of its chains of drafts is compared
with the target's distribution.

An EAGLE-3 head is trained on its own outputs, as in drafting ("training-time test" of the EAGLE-3
paper, arXiv 2503.01840): a chain of `unroll` steps along the text starts at every position."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tllm_spec.training.distill import (
    ARGMAX_SHARE,
    SELF_TEXT_SHARE,
    VALIDATION_LENGTH,
    VALIDATION_WINDOWS,
)
from tllm_spec.training.eagle3 import Eagle3Head, Eagle3Shape, FeatureHead, target_states
from tllm_spec.training.peagle import PEagleHead, PEagleShape, Rows
from tllm_spec.training.token_data import TokenData
from tllm_spec.training.trainer import Settings, add_dropout

STEP_DECAY = 0.9
"""Ratio of a step's weight in the loss to the previous step's: a late draft matters only if the
earlier ones were right."""
ALIGNMENT = 8
"""The number of chains of a sequence is a multiple of this, so that GEMMs use the tensor cores."""


def draft_vocabulary(texts: list[TokenData], shape: Eagle3Shape) -> Tensor:
    """`[draft_vocab_size]`: the most frequent token ids, ascending. Every text has the same weight,
    regardless of its size."""
    counts = [
        torch.bincount(text.tokens.int(), minlength=shape.vocab_size).double() for text in texts
    ]
    shares = torch.stack([count / count.sum() for count in counts]).mean(0)
    ids = shares.argsort(descending=True, stable=True)[: shape.draft_vocab_size].sort().values
    print(f"the draft vocabulary covers {shares[ids].sum().item():.1%} of the texts", flush=True)
    return ids


def build_head(
    shape: Eagle3Shape,
    target: Any,
    draft_ids: Tensor,
    run: Settings,
    start: FeatureHead | None = None,
) -> FeatureHead:
    """A new fp32 head of the kind of the shape, with the target's output layer and final norm, or
    with all that it has in common with the trained head `start`."""
    head: Eagle3Head | PEagleHead
    if isinstance(shape, PEagleShape):
        head = PEagleHead(shape, draft_ids.cpu())
        layers = list(head.layers)
    else:
        head = Eagle3Head(shape, draft_ids.cpu())
        layers = [head.midlayer]
    for matrix in (parameter for parameter in head.parameters() if parameter.dim() > 1):
        torch.nn.init.normal_(matrix, std=0.02)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
        head.norm.weight.copy_(target.model.norm.weight)
    if start is not None:
        trained = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in start.state_dict().items()
        }
        head.load_state_dict(trained, strict=False)
    for layer in layers:
        add_dropout(layer, run.dropout)
        if run.compile:  # dynamic: otherwise each step and sequence length is compiled separately
            layer.compile(dynamic=True)
    return head.to(draft_ids.device)


class Labels(NamedTuple):
    """The labels at every position of a text, in the head's vocabulary."""

    wanted: Tensor
    """`[B, T, D]`: weights of the draft tokens' log probabilities in the loss."""
    floor: Tensor
    """`[B, T]`: the constant that makes the KL part of a perfect head zero."""
    best: Tensor
    """`[B, T]`: the target's best token, in the target's ids."""


def labels(target_logits: Tensor, draft_ids: Tensor) -> Labels:
    """From logits `[B, T, V]`. With p the target's distribution, D the draft vocabulary and
    a = ARGMAX_SHARE, a position's loss is

        (1 - a) * sum over D of p(v) * (log p(v)/p(D) - log draft(v))  +  a * (-log draft(best))

    The first part is the KL of the renormalised p, weighted by p(D): tokens outside D do not
    contribute. The second part is zero if the target's best token is outside D."""
    logits = target_logits.float()
    best, restricted = logits.argmax(-1), logits[..., draft_ids]
    probabilities = (restricted - logits.logsumexp(-1, keepdim=True)).exp()
    floor = (probabilities * restricted.log_softmax(-1)).sum(-1)
    is_best = draft_ids == best.unsqueeze(-1)
    wanted = (1 - ARGMAX_SHARE) * probabilities + ARGMAX_SHARE * is_best
    return Labels(wanted, (1 - ARGMAX_SHARE) * floor, best)


def step_logits(
    head: FeatureHead, target: Any, features: Tensor, tokens: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The head's logits `[B, n, D]` at steps 0..unroll-1 along the text, and for each of the n rows
    the index `[n]` of the target's logits that predict the same token.

    `features` `[B, T, 3H]` and `tokens` `[B, T]` are of the same text."""
    embed = target.get_input_embeddings()
    if isinstance(head, PEagleHead):
        mask = embed(tokens.new_tensor(head.config.mask_token_id))
        yield from mask_logits(head, features, embed(tokens), mask, unroll)
        return
    assert isinstance(head, Eagle3Head)
    for step, logits in enumerate(chain_logits(head, features, embed(tokens), unroll)):
        yield logits, torch.arange(step + 1, step + 1 + logits.shape[1], device=tokens.device)


def mask_logits(
    head: PEagleHead, features: Tensor, embeddings: Tensor, mask_embedding: Tensor, unroll: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """See `step_logits`. Mask rows follow a third of the positions, drawn by chance, as there are
    many of them."""
    num_pairs = features.shape[1] - unroll
    num_anchors = max(1, num_pairs // 3 // ALIGNMENT) * ALIGNMENT
    chosen = torch.randperm(num_pairs, device=features.device)[:num_anchors]
    rows = Rows.of(num_pairs, chosen, unroll - 1)
    pairs = features[:, :num_pairs], embeddings[:, 1 : 1 + num_pairs]
    hidden = torch.split(head(*pairs, mask_embedding, rows), rows.sizes, 1)
    for own, positions in zip(hidden, torch.split(rows.positions, rows.sizes), strict=True):
        yield head.logits(own), positions + 1


def chain_logits(
    head: Eagle3Head, features: Tensor, embeddings: Tensor, unroll: int
) -> Iterator[Tensor]:
    """The head's logits at steps 0..unroll-1 along the text, for all chains that end within it.

    `features` `[B, T, 3H]` and `embeddings` `[B, T, H]` are of the same tokens; each result is
    `[B, T - unroll, D]`. Row s of step k predicts the token at `s + k + 2`, as the target's logits
    at `s + k + 1` do."""
    chains = features.shape[1] - unroll
    hidden, cache = head.fuse(features[:, :chains]), None
    for step in range(unroll):
        hidden, cache = head(hidden, embeddings[:, step + 1 : step + 1 + chains], cache)
        yield head.logits(hidden)


def unrolled(head: FeatureHead, target: Any, tokens: Tensor, unroll: int) -> tuple[Tensor, Tensor]:
    """Loss and agreement with the target's best tokens, each `[unroll]`, of `[B, T]` tokens."""
    tokens = tokens[:, : aligned_chains(tokens.shape[1], unroll) + unroll]
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        with torch.no_grad():
            features, target_logits = target_states(target, tokens)
            goal = labels(target_logits, head.draft_ids)
        losses, agreements = [], []
        for logits, rows in step_logits(head, target, features, tokens, unroll):
            wanted, floor, best = (part[:, rows] for part in goal)
            log_probs = F.log_softmax(logits.float(), -1)
            losses.append((floor - (wanted * log_probs).sum(-1)).mean())
            agreements.append((head.draft_ids[logits.argmax(-1)] == best).float().mean())
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
    """Training sequences come from the training files and from text that the target generated."""

    def loss(windows: int, length: int) -> Tensor:
        own = int(windows * SELF_TEXT_SHARE)
        tokens = torch.cat([data.sample(windows - own, length), self_text.sample(own, length)])
        return weighted(unrolled(head, target, tokens, unroll)[0])

    return loss


def eagle3_validation(
    head: FeatureHead, target: Any, heldout: TokenData, unroll: int
) -> Callable[[], dict[str, float]]:
    """`agreement_k`: how often draft k along held-out text is the target's best token."""

    def validate() -> dict[str, float]:
        figures = [
            torch.stack(unrolled(head, target, tokens, unroll))
            for tokens in heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS)
        ]
        losses, agreements = torch.stack(figures).mean(0)
        return {"loss": weighted(losses).item()} | {
            f"agreement_{draft}": rate for draft, rate in enumerate(agreements.tolist(), start=1)
        }

    return validate
