"""Acceptance of a draft model, an EAGLE-3 or P-EAGLE head, or MTP modules on held-out text,
computed exactly without a speculative engine.

As long as a draft model agrees with the target's greedy text, it reads that text. So its best
tokens at all positions of the finished text, from one forward, give the accepted length of every
chain of drafts.

The draft of a head or module for a token also depends on where its chain started: from there on it
reads its own outputs instead of the target's hidden states. So it drafts a chain from every
position, all in parallel."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tllm_spec.training.deepseek import NextnModules
from tllm_spec.training.draft_head import DraftHead, Head, steps_along
from tllm_spec.training.language_model import TokenData, continuations

BATCH = 64


@torch.inference_mode()
def evaluate(
    target: Any, draft: Any, heldout: TokenData, prompts: int, new_tokens: int, draft_len: int
) -> dict[str, Any]:
    """Figures over greedy continuations of `prompts` held-out prompts of 256 tokens. `draft`: a
    model, or a `DraftHead` or `NextnModules` in eval mode."""
    prompt_len, eos = 256, target.config.eos_token_id
    starts = torch.linspace(0, len(heldout.tokens) - prompt_len, prompts).long().tolist()
    all_prompts = torch.stack(
        [heldout.tokens[start : start + prompt_len] for start in starts]
    ).long()
    accepted: list[int] = []
    for batch in torch.split(all_prompts, BATCH):
        text = continuations(target, batch, new_tokens, do_sample=False)
        has_chains = isinstance(draft, (DraftHead, NextnModules))
        if has_chains:
            rows = head_matches(draft, target, text, draft_len)[:, prompt_len:]
        else:
            drafts = draft(input_ids=text, use_cache=False).logits[:, :-1].argmax(-1)
            rows = (drafts == text[:, 1:])[:, prompt_len - 1 :]
        rounds_of = chain_rounds if has_chains else rounds
        for row, written in zip(rows.tolist(), text[:, prompt_len:].tolist(), strict=True):
            length = written.index(eos) if eos in written else new_tokens
            accepted += rounds_of(row[:length], draft_len)
    return summary(accepted, draft_len)


def head_matches(head: Head, target: Any, text: Tensor, draft_len: int) -> Tensor:
    """`[B, T]` -> `[B, T]`: the number of accepted drafts of the chain whose first draft predicts
    token i; 0 if the text is too short for a whole chain, and for the first two tokens, which a
    head does not predict.

    The steps read the text. As long as drafts are accepted, they are the text."""
    steps = [
        step.is_best.view(len(text), -1) for step in steps_along(head, target, text, draft_len)
    ]
    return num_matches(torch.stack(steps, -1)[:, :-1])


def num_matches(is_right: Tensor) -> Tensor:
    """The leading right drafts of chains from every position, `[B, T - 1 - K, K]`, as in
    `head_matches`."""
    return F.pad(is_right.long().cumprod(-1).sum(-1), (2, is_right.shape[-1] - 1))


def rounds(matches: list[bool], draft_len: int) -> list[int]:
    """`chain_rounds` of a draft model, whose draft for a token does not depend on where its chain
    started.

    `matches[i]`: the draft's best token at i equals the target's token i.
    """
    chains = [[*matches[start : start + draft_len], False] for start in range(len(matches))]
    return chain_rounds([chain.index(False) for chain in chains], draft_len)


def chain_rounds(num_matches: list[int], draft_len: int) -> list[int]:
    """The number of accepted drafts in every whole round of one text.

    `num_matches[i]`: the same for a chain whose first draft predicts token i. Token 0 comes from
    the prompt's forward; a round with `a` accepted drafts emits `a + 1` tokens."""
    accepted, position = [], 1
    while position + draft_len < len(num_matches):
        accepted.append(num_matches[position])
        position += accepted[-1] + 1
    return accepted


def standard_error(accepted: list[list[int]]) -> float:
    """That of the mean over the rounds of several texts. The rounds of a text resemble each other,
    so a text is one observation; of a single text its rounds are taken as such."""
    groups = [rounds for rounds in accepted if rounds]
    groups = groups if len(groups) > 1 else [[each] for rounds in groups for each in rounds]
    number = sum(map(len, groups))
    if number == 0 or len(groups) < 2:
        return 0.0
    mean = sum(map(sum, groups)) / number
    squares = sum((sum(group) - mean * len(group)) ** 2 for group in groups)
    return float((squares * len(groups) / (len(groups) - 1)) ** 0.5 / number)


def summary(accepted: list[int], draft_len: int) -> dict[str, Any]:
    """`per_position[k]`: the share of rounds in which draft k was accepted."""
    counts = torch.tensor(accepted)
    per_position = [(counts > position).float().mean().item() for position in range(draft_len)]
    return {
        "acceptance_length": round(1 + counts.float().mean().item(), 3),
        "per_position": [round(rate, 3) for rate in per_position],
        "draft_len": draft_len,
        "rounds": len(accepted),
    }
