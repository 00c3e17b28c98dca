"""Trains a head for any target that transformers loads: `tllm-train head`."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from tllm_spec.adapters.adapter_folder import DRAFT
from tllm_spec.attention.interface import default_capture_layers
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.registry import model_config
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.progress import progress
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import states_files
from tllm_spec.recording.traffic_record import TrafficRecord
from tllm_spec.training.acceptance import chain_rounds, num_matches, standard_error, summary
from tllm_spec.training.adapter_head import DEFAULT_RANK, TargetAdapter, add_low_rank, save_low_rank
from tllm_spec.training.adapter_head import LEARNING_RATE as OF_ADAPTERS
from tllm_spec.training.draft_head import DraftHead, steps_along, unrolled, weighted
from tllm_spec.training.head_files import (
    Format,
    build_head,
    config_json,
    draft_vocabulary,
    load_head,
    new_shape,
    save_head,
)
from tllm_spec.training.language_model import TokenData, load_language_model
from tllm_spec.training.texts import Text, batches, draw, padded, read_texts, split, unseen_records
from tllm_spec.training.trainer import FILE, METRICS, Ranks, Settings, train
from tllm_spec.zoo.registry import resolve_model

Kind = Literal["eagle3", "peagle"]
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
MAX_LENGTH = 2048  # tokens of a sequence
VALIDATION_TOKENS = 2 * MAX_LENGTH  # of a batch
MAX_DRAFT_VOCABULARY = 32_000
BATCH_TOKENS = {"cuda": 16384, "cpu": 1024}
NUM_CHECKPOINTS = {"cuda": 10, "cpu": 5}  # of a run; a CPU takes a while for each validation
MIN_STEPS_OF_ALL = 8  # that read as many tokens as there are
LEARNING_RATE = 5e-4  # of a new head, and of one that goes on with 16384 tokens a step
NARROW, NARROW_RATE = 1024, 2e-3  # a new head of fewer channels
FEW_HELD_OUT = 50  # texts, below which figures are too uncertain to compare heads
FEW_STEPS = 50


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
    steps: int | None
    minutes: float | None
    batch_tokens: int | None
    learning_rate: float | None
    checkpoint_steps: int | None
    resume: bool
    dtype: Literal["bf16", "float32"]
    device: str
    adapter: str | None = None
    rank: int | None = None


def train_head(options: HeadOptions) -> None:
    """Trains, and says what it has brought. Raises ValueError as `run_head` does."""
    records, can_swap = run_head(options)
    if records is not None:
        judge(options, records)
        tell_how_to_serve(options, can_swap=can_swap)


def run_head(options: HeadOptions) -> tuple[list[TrafficRecord] | None, bool]:
    """Returns the records that were held out, and whether the head can be swapped for that of
    `--init`; None on all ranks but the first. Raises ValueError for options that do not fit each
    other, the target or the texts, and for a folder that has another run."""
    if not options.resume and (options.output / METRICS).exists():
        raise ValueError(
            f"{options.output} has a run: --resume goes on from its checkpoint, if it has not "
            "ended; a new run needs another folder"
        )
    folder = resolve_model(options.model)
    config = model_config(folder)
    start = None if options.start is None else load_head(resolve_model(options.start), config)
    served = _adapter_of(options, start)
    batch_tokens = options.batch_tokens or BATCH_TOKENS[options.device]
    length = min(MAX_LENGTH, config.max_positions, batch_tokens)
    shape = _shape(options, config, start, length)
    config_file = _config_file(options, shape, config, start)
    layers = shape.capture_layers or default_capture_layers(config.num_layers)
    with progress("start", 2) as bar:
        bar.begin("texts")
        longest = length - options.unroll
        texts = read_texts(options.data, options.model, longest, options.unroll, layers)
        if served is not None:
            texts = served.own(texts, options.data)
        training, held_out = split(texts, options.data, options.unroll)
        ranks, device = Ranks.join(options.device)
        _check_number(training, options, ranks)
        settings = settings_of(options, training, shape.hidden_size)
        if ranks.is_first:
            _tell(settings, training, held_out, options.unroll)
        bar.begin("target")
        target = load_language_model(folder, DTYPES[options.dtype], device)
        if served is not None and any(text.file is None for text in texts):
            served.merge(target)
    torch.manual_seed(settings.seed)  # all ranks begin with the same weights
    ids = _vocabulary(training, shape) if start is None else start.draft_ids
    head = build_head(shape, target, ids.to(device), settings, start)
    save_best: Callable[[DraftHead], None]
    save_best = partial(save_head, config=config_file, output=options.output)
    if served is not None:
        add_low_rank(head, options.rank or DEFAULT_RANK)
        save_best = partial(save_low_rank, output=options.output)
    loss = head_loss(head, target, training, options.unroll, ranks)
    validation = partial(acceptance_of, head, target, held_out, options.unroll)
    train(head, loss, validation, settings, options.output, save_best, ranks=ranks)
    ranks.leave()
    if ranks.is_first:  # a run that has ended is not resumed
        (options.output / FILE).unlink()
    records = unseen_records(training, held_out) if ranks.is_first else None
    return records, served is None and start is not None and shape == start.config


def _adapter_of(options: HeadOptions, start: DraftHead | None) -> TargetAdapter | None:
    if options.adapter is None:
        if options.rank is not None:
            raise ValueError(f"--rank {options.rank} needs --adapter")
        return None
    if start is None or start.mask_token is not None:
        raise ValueError("--adapter needs --init: the EAGLE-3 head that it is served with")
    if options.kind is not None or options.format is not None:
        raise ValueError("--kind, --format: the head in --init stays; leave them out")
    return TargetAdapter.read(options.adapter)


def settings_of(options: HeadOptions, training: list[Text], hidden_size: int) -> Settings:
    """What is not given follows from the device, the number of tokens and the head's width."""
    num_tokens = sum(len(text.tokens) for text in training)
    fitting = min(BATCH_TOKENS[options.device], max(1, num_tokens // MIN_STEPS_OF_ALL))
    batch_tokens = options.batch_tokens or fitting
    rate = LEARNING_RATE
    if options.adapter is not None:
        rate = OF_ADAPTERS
    elif options.start is not None:
        rate *= (batch_tokens / BATCH_TOKENS["cuda"]) ** 0.5
    elif hidden_size < NARROW:
        rate = NARROW_RATE
    return Settings(
        minutes=options.minutes or math.inf,
        steps=options.steps or 10**9,
        windows=batch_tokens,
        length=1,
        learning_rate=rate if options.learning_rate is None else options.learning_rate,
        checkpoint_steps=options.checkpoint_steps or Settings.checkpoint_steps,
        num_checkpoints=0 if options.checkpoint_steps else NUM_CHECKPOINTS[options.device],
        resume=options.resume,
    )


def judge(options: HeadOptions, records: list[TrafficRecord]) -> None:
    """Prints the tokens a round of held-out records in a replay, as they would be served: before,
    with the head of `--init` or else as they were served, and after."""
    run = json.loads((options.output / METRICS).read_text(encoding="utf-8"))
    if run["history"][-1]["step"] < FEW_STEPS:
        _warn("few steps were made: give more --minutes, or steps of fewer --batch_tokens")
    if run["step"] == 0:
        _warn(f"no step made the held-out loss lower: {options.output} has the head of step 0")
    if not records:
        _print({"replayed": 0, "reason": f"{options.data} has no held-out records of traffic"})
        return
    try:
        if options.start is None:
            before = sum((record.stats for record in records), SpeculativeStats())
        else:
            before = _replayed(options, resolve_model(options.start), records)
        after = _replayed(options, options.output, records, is_trained=True)
    except (ValueError, torch.cuda.OutOfMemoryError) as error:
        _print({"replayed": 0, "reason": str(error)})
        return
    lengths = {"before": before.acceptance_length, "after": after.acceptance_length}
    _print({"replayed": len(records), "tokens_per_round": lengths})
    if lengths["after"] < lengths["before"]:
        _warn("the replay finds the drafts of before better: train on more texts before it serves")


def _replayed(
    options: HeadOptions, head: Path, records: list[TrafficRecord], *, is_trained: bool = False
) -> SpeculativeStats:
    """With an adapter `head` has its LoRA, if it is trained."""
    own: dict[str, Any] = {"device": options.device, "skip_tokenizer_init": True}
    with ExitStack() as stack:
        if options.adapter is not None:
            served, draft = TargetAdapter.read(options.adapter), head if is_trained else None
            lora = served.lora_config(draft, options.rank or DEFAULT_RANK)
            own["lora_config"] = stack.enter_context(lora)
            head = resolve_model(str(options.start))
        own["speculative_config"] = _served(head, options.unroll)
        args = LlmArgs.from_kwargs(options.model, **own)
        return replay(records, args, states_files(options.data)).total


def _served(head: Path, draft_len: int) -> dict[str, Any]:
    return {"decoding_type": "Eagle3", "speculative_model": str(head), "max_draft_len": draft_len}


def tell_how_to_serve(options: HeadOptions, *, can_swap: bool) -> None:
    output, served = options.output, _served(options.output, options.unroll)
    if options.adapter is not None:
        name, _, folder = options.adapter.partition("=")
        rank = options.rank or DEFAULT_RANK
        print(f"Serve it as {folder}/{DRAFT}, loaded with the adapter {name}, by a server with")
        print(yaml.safe_dump({"lora_config": {"max_draft_lora_rank": rank}}), end="")
        return
    print(f"Serve it: tllm-serve {options.model} --config x.yaml, where x.yaml has")
    print(yaml.safe_dump({"speculative_config": served}, sort_keys=False), end="")
    if can_swap:
        print(
            f"or swapped into a server with --draft_model_root {output.parent or '.'}: POST "
            f"/v1/draft_model {json.dumps({'folder': output.name})}"
        )


def _check_number(training: list[Text], options: HeadOptions, ranks: Ranks) -> None:
    num_with_states = sum(text.file is not None for text in training)
    for number in (num_with_states, len(training) - num_with_states):
        if 0 < number < ranks.size:
            raise ValueError(f"{options.data} has {number} texts for {ranks.size} processes")


def _tell(settings: Settings, training: list[Text], held_out: list[Text], unroll: int) -> None:
    num_with_states = sum(text.file is not None for text in training)
    print(f"{len(training)} texts, {num_with_states} with states, {len(held_out)} held out")
    print(
        f"batch_tokens {settings.windows}, learning_rate {settings.learning_rate:.2g}, unroll "
        f"{unroll}"
    )
    if len(held_out) < FEW_HELD_OUT:
        _warn(
            f"{len(held_out)} texts are held out, which is too few to tell a better head from a "
            f"worse one: of every 20 texts one is, so record {20 * FEW_HELD_OUT} or more"
        )


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row))


def _warn(sentence: str) -> None:
    print(f"Warning: {sentence}.", file=sys.stderr)


def _shape(
    options: HeadOptions, config: ModelConfig, start: DraftHead | None, length: int
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
    options: HeadOptions, shape: Eagle3Config, config: ModelConfig, start: DraftHead | None
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
    head: DraftHead, target: Any, texts: list[Text], unroll: int, ranks: Ranks
) -> Callable[[int, int], Tensor]:
    """The loss of this rank's share of a batch of `windows * length` tokens."""

    def loss(windows: int, length: int) -> Tensor:
        batch = draw(texts, windows * length, unroll, target.device, ranks.share)
        return weighted(unrolled(head, target, batch, unroll)[0])

    return loss


def acceptance_of(head: DraftHead, target: Any, texts: list[Text], unroll: int) -> dict[str, float]:
    """Figures over the outputs: the loss, and the acceptance of `unroll` greedy drafts a round
    where the target's best tokens are accepted."""
    sums = torch.zeros(2, unroll, device=target.device)
    accepted: list[list[int]] = []
    groups = batches(texts, VALIDATION_TOKENS)
    with progress("validation", len(groups), "batches", every=5) as bar:
        for group in groups:
            batch = padded(group, unroll, target.device)
            steps = list(steps_along(head, target, batch.tokens, unroll, batch.states))
            for index, step in enumerate(steps):
                weights = batch.counts[:, step.rows].flatten().to(target.device)
                sums[:, index] += torch.stack([(weights * step.losses).sum(), weights.sum()])
            is_best = torch.stack([step.is_best.view(len(group), -1) for step in steps], -1)
            for text, matches in zip(group, num_matches(is_best[:, :-1]).tolist(), strict=True):
                accepted.append(chain_rounds(matches[text.start : len(text.tokens)], unroll))
            bar.advance()
    figures = summary([each for rounds in accepted for each in rounds], unroll)
    return {
        "loss": weighted(sums[0] / sums[1]).item(),
        "acceptance_length": figures["acceptance_length"],
        "standard_error": standard_error(accepted),  # of the acceptance length
        **{f"accepted_{k}": rate for k, rate in enumerate(figures["per_position"], start=1)},
    }
