"""Text that a model generates with transformers: half of it greedy, half sampled at T=1."""

import time
from typing import Any

import torch
from torch import Tensor

from tllm_spec.training.token_data import TokenData

PROMPT_LEN = 128


@torch.inference_mode()
def continuations(model: Any, prompts: Tensor, new_tokens: int, do_sample: bool) -> Tensor:
    """`[B, P]` prompts -> `[B, P + new_tokens]`; the end token is ignored, so that all have the
    same length."""
    with torch.autocast("cuda", torch.bfloat16, enabled=prompts.is_cuda):
        text: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            eos_token_id=None,
            do_sample=do_sample,
            temperature=1.0 if do_sample else None,
            top_k=0 if do_sample else None,
        )
    return text


def write_self_text(
    model: Any, data: TokenData, minutes: float, batch: int, new_tokens: int
) -> TokenData:
    """At least one greedy and one sampled batch, and more until `minutes` have passed.

    Prompts are cut from `data`. A text is a prompt and the target's continuation."""
    deadline = time.monotonic() + 60 * minutes
    texts: list[Tensor] = []
    while len(texts) < 2 or time.monotonic() < deadline:
        prompts = data.sample(batch, PROMPT_LEN)
        texts.append(
            continuations(model, prompts, new_tokens, do_sample=len(texts) % 2 == 1)
            .flatten()
            .short()
        )
    tokens = torch.cat(texts).clone()
    print(f"the target wrote {len(texts) * batch * new_tokens} tokens", flush=True)
    return TokenData(tokens, num_bytes=0)
