"""Training data and losses of whole models: windows of token files, texts that a model writes
itself, the next token, and a teacher's distribution."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tllm_spec.training.trainer import Settings, add_dropout
from tllm_spec.zoo.registry import is_gguf

# Token arrays on the training device: random sequences for training, all sequences in order for
# validation.


@dataclass(frozen=True)
class TokenData:
    tokens: Tensor
    """`[N]` int16, on the training device: the documents, concatenated."""
    num_bytes: int
    """Size of the text in bytes."""

    @classmethod
    def load(cls, file: Path, device: torch.device) -> "TokenData":
        with np.load(file) as arrays:
            tokens = torch.from_numpy(arrays["tokens"].astype(np.int16))
            return cls(tokens.to(device), int(arrays["num_bytes"]))

    def sample(self, num_windows: int, length: int) -> Tensor:
        """`[num_windows, length]` int64: sequences from random offsets, which may span
        documents."""
        device = self.tokens.device
        offsets = torch.randint(len(self.tokens) - length + 1, (num_windows, 1), device=device)
        return self.tokens[offsets + torch.arange(length, device=device)].long()

    def windows(self, length: int, num_windows: int) -> Iterator[Tensor]:
        """Batches `[<= num_windows, length]` of consecutive sequences over all tokens, without a
        tail shorter than one sequence."""
        whole = self.tokens[: len(self.tokens) // length * length].view(-1, length)
        for batch in torch.split(whole, num_windows):
            yield batch.long()


# A language model of transformers that is trained: its making and its logits.


def build_model(
    shape: Path,
    settings: Settings,
    device: torch.device,
    changed: Callable[[Any], Any] = lambda model: model,
) -> Any:
    """A new fp32 model with the shape in `shape/config.json`, after `changed`."""
    config = AutoConfig.from_pretrained(shape, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = changed(model).to(device)
    for layer in model.model.layers:
        add_dropout(layer, settings.dropout)
        if settings.compile:  # layer by layer: all layers share one compilation
            layer.compile(dynamic=False)
    return model


def load_language_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A trained model of a folder or GGUF file, without gradients."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if is_gguf(folder):
        source = {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """`[B, T]` -> `[B, T, V]`, with bf16 autocast on a GPU and in fp32 on a CPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


# Text that a model generates with transformers: half of it greedy, half sampled at T=1.


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
        text = continuations(model, prompts, new_tokens, do_sample=len(texts) % 2 == 1)
        texts.append(text.flatten().short())
    tokens = torch.cat(texts).clone()
    print(f"the target wrote {len(texts) * batch * new_tokens} tokens", flush=True)
    return TokenData(tokens, num_bytes=0)


# Training losses: next-token cross entropy for the target, distillation from it for the draft.


ARGMAX_SHARE = 0.3
"""Weight of the cross entropy on the target's best token in the draft's loss; the rest is KL."""
SELF_TEXT_SHARE = 0.5
VALIDATION_WINDOWS = 16
VALIDATION_LENGTH = 1024


def mean_figures(
    figures: Callable[[Tensor], dict[str, Tensor]], heldout: TokenData
) -> dict[str, float]:
    """Means over held-out text of what `figures` has for `[B, T]` tokens: `name`, or for `[K]`
    values `name_1` to `name_K`."""
    batches = heldout.windows(VALIDATION_LENGTH, VALIDATION_WINDOWS)
    found = [figures(tokens) for tokens in batches]
    means: dict[str, float] = {}
    for name in found[0]:
        mean = torch.stack([each[name] for each in found]).mean(0)
        if mean.dim():
            means |= {f"{name}_{number}": each for number, each in enumerate(mean.tolist(), 1)}
        else:
            means[name] = mean.item()
    return means


def target_figures(model: Any, tokens_per_byte: float, tokens: Tensor) -> dict[str, Tensor]:
    nats = cross_entropy(logits_of(model, tokens[:, :-1]), tokens[:, 1:])
    return {"loss": nats, "bits_per_byte": nats / math.log(2) * tokens_per_byte}


def draft_figures(draft: Any, target: Any, tokens: Tensor) -> dict[str, Tensor]:
    """`agreement`: how often both models have the same best token."""
    with torch.no_grad():
        target_logits = logits_of(target, tokens)
    logits = logits_of(draft, tokens)
    agreement = (logits.argmax(-1) == target_logits.argmax(-1)).float().mean()
    with torch.no_grad():
        nats = cross_entropy(logits[:, :-1], tokens[:, 1:])
    loss = distillation_loss(logits, target_logits)
    return {"loss": loss, "agreement": agreement, "nats_per_token": nats}


def mixed(data: TokenData, self_text: TokenData, windows: int, length: int) -> Tensor:
    """`[windows, length]`: sequences of the training files and of text that the target wrote."""
    own = int(windows * SELF_TEXT_SHARE)
    return torch.cat([data.sample(windows - own, length), self_text.sample(own, length)])


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
