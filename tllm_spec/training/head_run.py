"""Trains a head for any target that transformers loads: `tllm-train head`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tllm_spec.models.config import ModelConfig
from tllm_spec.training.acceptance import chain_rounds, num_matches, summary
from tllm_spec.training.eagle3 import FeatureHead
from tllm_spec.training.head_files import (
    Format,
    build_head,
    config_json,
    draft_vocabulary,
    load_head,
    new_shape,
    save_head,
)
from tllm_spec.training.head_loss import Batch, steps_along, unrolled, weighted
from tllm_spec.training.language_model import load_language_model
from tllm_spec.training.ranks import Ranks
from tllm_spec.training.texts import Text, draw, padded, read_texts, split
from tllm_spec.training.token_data import TokenData
from tllm_spec.training.trainer import Settings, train
from tllm_spec.zoo.registry import resolve_model

MAX_LENGTH = 2048  # tokens of a sequence
MAX_DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True)
class HeadOptions:
    """What the command's options of the same names say."""

    model: str
    data: Path
    output: Path
    kind: Literal["eagle3", "peagle"]
    start: str | None
    format: Format | None
    draft_vocab_size: int | None
    layers: int
    unroll: int
    dtype: Literal["bf16", "float32"]
    device: str


def train_head(options: HeadOptions, settings: Settings) -> None:
    """Raises ValueError for options that do not fit each other, the target or the texts."""
    ranks, device = Ranks.join(options.device)
    folder = resolve_model(options.model)
    config = ModelConfig.from_pretrained(folder)
    start = None if options.start is None else load_head(resolve_model(options.start), config)
    length = min(MAX_LENGTH, config.max_positions, settings.windows * settings.length)
    texts = read_texts(options.data, options.model, length - options.unroll, options.unroll)
    training, held_out = split(texts, options.data, options.unroll)
    if len(training) < ranks.size:
        raise ValueError(f"{options.data} has {len(training)} texts for {ranks.size} processes")
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    target = load_language_model(folder, dtype, device)
    torch.manual_seed(settings.seed)  # all ranks begin with the same weights
    head = _head(options, config, target, training, settings, start)
    form = options.format or ("eagle" if options.kind == "eagle3" else "speculators")
    config_file = config_json(head.config, config, form)
    if ranks.is_first:
        print(f"{len(training)} texts to train on, {len(held_out)} held out", flush=True)
    loss = head_loss(head, target, training, options.unroll, ranks)
    validation = partial(acceptance_of, head, target, held_out, options.unroll)
    save_best = partial(save_head, config=config_file, output=options.output)
    train(head, loss, validation, settings, options.output, save_best, ranks=ranks)


def _head(
    options: HeadOptions,
    config: ModelConfig,
    target: Any,
    training: list[Text],
    settings: Settings,
    start: FeatureHead | None,
) -> FeatureHead:
    mask_token = config.eos_token_ids[0] if options.kind == "peagle" else None
    size = options.draft_vocab_size or min(config.vocab_size, MAX_DRAFT_VOCABULARY)
    shape = new_shape(config, size, options.layers, mask_token)
    if start is None:
        outputs = torch.cat([text.tokens[text.start :] for text in training])
        everything = torch.cat([text.tokens for text in training])
        ids, _ = draft_vocabulary([TokenData(each, 0) for each in (outputs, everything)], shape)
    else:
        ids = start.draft_ids
    return build_head(shape, target, ids.to(target.device), settings, start)


def head_loss(
    head: FeatureHead, target: Any, texts: list[Text], unroll: int, ranks: Ranks
) -> Callable[[int, int], Tensor]:
    """The loss of this rank's share of a batch of `windows * length` tokens."""

    def loss(windows: int, length: int) -> Tensor:
        batch = draw(texts, windows * length, unroll, ranks.share)
        on_device = Batch(
            batch.tokens.to(target.device), batch.counts.to(target.device), batch.share
        )
        return weighted(unrolled(head, target, on_device, unroll)[0])

    return loss


def acceptance_of(
    head: FeatureHead, target: Any, texts: list[Text], unroll: int
) -> dict[str, float]:
    """Figures over the outputs: the loss, and the acceptance of `unroll` greedy drafts a round
    where the target's best tokens are accepted."""
    losses = torch.zeros(unroll, device=target.device)
    number, accepted = 0, list[int]()
    for text in texts:
        batch = padded([text], unroll)
        steps = list(steps_along(head, target, batch.tokens.to(target.device), unroll))
        counts = batch.counts.to(target.device)
        losses += torch.stack([(counts[:, step.rows] * step.losses).sum() for step in steps])
        number += int(batch.counts.sum())
        chains = num_matches(torch.stack([step.is_best for step in steps], -1)[:, :-1])
        accepted += chain_rounds(chains[0, text.start : len(text.tokens)].tolist(), unroll)
    figures = summary(accepted, unroll)
    return {
        "loss": weighted(losses / number).item(),
        "acceptance_length": figures["acceptance_length"],
        **{f"accepted_{k}": rate for k, rate in enumerate(figures["per_position"], start=1)},
    }
