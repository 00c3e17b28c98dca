"""Acceptance of a draft model on held-out text, computed exactly without a speculative engine.

While a draft agrees with the target's greedy text, what it reads is that text itself. So its best tokens over
the finished text, all positions in one forward pass, tell how far every chain of drafts would have come.
"""

from typing import Any

import torch

from tllm_spec.zoo.self_text import continuations
from tllm_spec.zoo.token_data import TokenData

BATCH = 64


@torch.inference_mode()
def evaluate(
    target: Any, draft: Any, heldout: TokenData, prompts: int, new_tokens: int, draft_len: int
) -> dict[str, Any]:
    """Greedy continuations of `prompts` held-out prompts of 256 tokens each."""
    prompt_len, eos = 256, target.config.eos_token_id
    starts = torch.linspace(0, len(heldout.tokens) - prompt_len, prompts).long().tolist()
    all_prompts = torch.stack([heldout.tokens[start : start + prompt_len] for start in starts]).long()
    accepted: list[int] = []
    for batch in torch.split(all_prompts, BATCH):
        text = continuations(target, batch, new_tokens, do_sample=False)
        drafts = draft(input_ids=text, use_cache=False).logits[:, :-1].argmax(-1)
        matches = (drafts == text[:, 1:])[:, prompt_len - 1 :]
        for row, written in zip(matches.tolist(), text[:, prompt_len:].tolist(), strict=True):
            length = written.index(eos) if eos in written else new_tokens
            accepted += rounds(row[:length], draft_len)
    return summary(accepted, draft_len)


def rounds(matches: list[bool], draft_len: int) -> list[int]:
    """Accepted drafts of every whole round of one text.

    `matches[i]`: the draft's best token at i is the target's token i. Token 0 comes with the prompt; a round
    with `a` accepted drafts emits `a + 1` tokens.
    """
    accepted, position = [], 1
    while position + draft_len < len(matches):
        chain = matches[position : position + draft_len]
        accepted.append(chain.index(False) if False in chain else draft_len)
        position += accepted[-1] + 1
    return accepted


def summary(accepted: list[int], draft_len: int) -> dict[str, Any]:
    """`per_position[k]`: share of the rounds whose draft k was accepted."""
    counts = torch.tensor(accepted)
    per_position = [(counts > position).float().mean().item() for position in range(draft_len)]
    return {
        "acceptance_length": round(1 + counts.float().mean().item(), 3),
        "per_position": [round(rate, 3) for rate in per_position],
        "draft_len": draft_len,
        "rounds": len(accepted),
    }
