"""Trains a head for any target that transformers loads: `tllm-train head`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tllm_spec.attention.spec_metadata import default_capture_layers
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.training.acceptance import chain_rounds, num_matches, summary
from tllm_spec.training.checkpoint import FILE
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
from tllm_spec.training.head_loss import steps_along, unrolled, weighted
from tllm_spec.training.language_model import load_language_model
from tllm_spec.training.ranks import Ranks
from tllm_spec.training.texts import Text, batches, draw, padded, read_texts, split
from tllm_spec.training.token_data import TokenData
from tllm_spec.training.trainer import Settings, train
from tllm_spec.zoo.registry import resolve_model

Kind = Literal["eagle3", "peagle"]
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MAX_LENGTH = 2048  # tokens of a sequence
VALIDATION_TOKENS = 2 * MAX_LENGTH  # of a batch
MAX_DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True)
class HeadOptions:
    """What the command's options of the same names say; None: not given."""

    model: str
    data: Path
    output: Path
    kind: Kind | None
    start: str | None
    format: Format | None
    draft_vocab_size: int | None
    layers: int | None
    norms: tuple[str, ...]
    unroll: int
    dtype: Literal["bf16", "float32"]
    device: str


def train_head(options: HeadOptions, settings: Settings) -> None:
    """Raises ValueError for options that do not fit each other, the target or the texts, and for a
    folder that has another run."""
    if not settings.resume and (options.output / FILE).exists():
        raise ValueError(
            f"{options.output} has the checkpoint of a run: --resume goes on from it; a new run "
            "needs another folder"
        )
    folder = resolve_model(options.model)
    config = ModelConfig.from_pretrained(folder)
    start = None if options.start is None else load_head(resolve_model(options.start), config)
    length = min(MAX_LENGTH, config.max_positions, settings.windows * settings.length)
    shape = _shape(options, config, start, length)
    config_file = _config_file(options, shape, config, start)
    layers = shape.capture_layers or default_capture_layers(config.num_layers)
    texts = read_texts(options.data, options.model, length - options.unroll, options.unroll, layers)
    training, held_out = split(texts, options.data, options.unroll)
    ranks, device = Ranks.join(options.device)
    num_with_states = sum(text.file is not None for text in training)
    for number in (num_with_states, len(training) - num_with_states):
        if 0 < number < ranks.size:
            raise ValueError(f"{options.data} has {number} texts for {ranks.size} processes")
    if ranks.is_first:
        print(f"{len(training)} texts, {num_with_states} with states, {len(held_out)} held out")
    target = load_language_model(folder, DTYPES[options.dtype], device)
    torch.manual_seed(settings.seed)  # all ranks begin with the same weights
    ids = _vocabulary(training, shape) if start is None else start.draft_ids
    head = build_head(shape, target, ids.to(device), settings, start)
    loss = head_loss(head, target, training, options.unroll, ranks)
    validation = partial(acceptance_of, head, target, held_out, options.unroll)
    save_best = partial(save_head, config=config_file, output=options.output)
    train(head, loss, validation, settings, options.output, save_best, ranks=ranks)
    ranks.leave()


def _shape(
    options: HeadOptions, config: ModelConfig, start: FeatureHead | None, length: int
) -> Eagle3Config:
    """A P-EAGLE head may start from an EAGLE-3 head. A new head sees as many tokens as the longest
    text of its training may have."""
    starts_parallel = start is not None and start.config.mask_token is not None
    kind = options.kind or ("peagle" if starts_parallel else "eagle3")
    mask_token = next(iter(config.eos_token_ids), 0) if kind == "peagle" else None
    if start is None:
        size = min(options.draft_vocab_size or MAX_DRAFT_VOCABULARY, config.vocab_size)
        num_layers = options.layers or {"eagle3": 1, "peagle": 2}[kind]
        return new_shape(config, size, num_layers, mask_token, options.norms, length)
    becomes_parallel = kind == "peagle" and not starts_parallel
    refused = {
        "--draft_vocab_size": options.draft_vocab_size is not None,
        "--norm": bool(options.norms),
        "--layers": options.layers is not None and not becomes_parallel,
        "--kind": kind == "eagle3" and starts_parallel,
    }
    if given := ", ".join(name for name, is_given in refused.items() if is_given):
        raise ValueError(f"{given}: that of the head in --init stays; leave it out")
    if not becomes_parallel:
        return start.config
    num_layers = options.layers or max(2, start.config.num_layers)
    layers = frozenset(range(num_layers)) if start.config.sliding_layers else frozenset[int]()
    parallel = replace(start.config, num_layers=num_layers, mask_token=mask_token)
    return replace(parallel, sliding_layers=layers)


def _config_file(
    options: HeadOptions, shape: Eagle3Config, config: ModelConfig, start: FeatureHead | None
) -> str:
    """That of `--init` where nothing else is asked for, so that the head can be swapped in."""
    if options.start is not None and options.format is None and start and shape == start.config:
        return (resolve_model(options.start) / "config.json").read_text(encoding="utf-8")
    form = options.format or ("eagle" if shape.mask_token is None else "speculators")
    return config_json(shape, config, form)


def _vocabulary(texts: list[Text], shape: Eagle3Config) -> Tensor:
    """The most frequent tokens; outputs have more weight than prompts."""
    outputs = torch.cat([text.tokens[text.start :] for text in texts])
    everything = torch.cat([text.tokens for text in texts])
    return draft_vocabulary([TokenData(each, 0) for each in (outputs, everything)], shape)[0]


def head_loss(
    head: FeatureHead, target: Any, texts: list[Text], unroll: int, ranks: Ranks
) -> Callable[[int, int], Tensor]:
    """The loss of this rank's share of a batch of `windows * length` tokens."""

    def loss(windows: int, length: int) -> Tensor:
        batch = draw(texts, windows * length, unroll, target.device, ranks.share)
        return weighted(unrolled(head, target, batch, unroll)[0])

    return loss


def acceptance_of(
    head: FeatureHead, target: Any, texts: list[Text], unroll: int
) -> dict[str, float]:
    """Figures over the outputs: the loss, and the acceptance of `unroll` greedy drafts a round
    where the target's best tokens are accepted."""
    sums = torch.zeros(2, unroll, device=target.device)
    accepted: list[int] = []
    for group in batches(texts, VALIDATION_TOKENS):
        batch = padded(group, unroll, target.device)
        steps = list(steps_along(head, target, batch.tokens, unroll, batch.states))
        for index, step in enumerate(steps):
            weights = batch.counts[:, step.rows].flatten().to(target.device)
            sums[:, index] += torch.stack([(weights * step.losses).sum(), weights.sum()])
        is_best = torch.stack([step.is_best.view(len(group), -1) for step in steps], -1)
        for text, matches in zip(group, num_matches(is_best[:, :-1]).tolist(), strict=True):
            accepted += chain_rounds(matches[text.start : len(text.tokens)], unroll)
    figures = summary(accepted, unroll)
    return {
        "loss": weighted(sums[0] / sums[1]).item(),
        "acceptance_length": figures["acceptance_length"],
        **{f"accepted_{k}": rate for k, rate in enumerate(figures["per_position"], start=1)},
    }
