"""Trains and measures the zoo's models: `python -m tllm_spec.zoo.train
target|draft|eagle3|deepseek|token-map|evaluate --help`.

Needs the token arrays of `tllm_spec.zoo.train_tokenizer`, but no corpus. A GPU takes minutes; a CPU
works with smaller batches (`--self-text-batch`, `--windows`). A model has the shape of the
config.json in the zoo, or of `--shape FOLDER`. The defaults and `--compile` made the weights in the
zoo on one H200."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from tllm_spec.cli.version import Decorator, flag, option, together
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.draft_head import head_kind
from tllm_spec.models.registry import model_config
from tllm_spec.training.acceptance import evaluate as acceptance
from tllm_spec.training.deepseek import (
    SHAPE,
    NextnModules,
    balance,
    build_modules,
    build_target,
    load_target,
    modules_figures,
    save_model,
    save_with_modules,
)
from tllm_spec.training.draft_head import DraftHead, aligned_chains, head_figures
from tllm_spec.training.head_files import (
    build_head,
    draft_vocabulary,
    load_head,
    read_shape,
    save_head,
)
from tllm_spec.training.language_model import (
    TokenData,
    build_model,
    draft_figures,
    load_language_model,
    mean_figures,
    mixed,
    target_figures,
    write_self_text,
)
from tllm_spec.training.trainer import Settings, train
from tllm_spec.zoo.registry import resolve_model

FOLDER = click.Path(path_type=Path, file_okay=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def training_options(
    shape: str, minutes: float, learning_rate: float, dropout: float, windows: int = 64
) -> Decorator:
    """The options of every training run; `Settings` has the same names."""
    return together(
        option("--data", FOLDER, "Folder with training.npz and heldout.npz.", required=True),
        option("--output", FOLDER, "Folder for the best weights so far.", required=True),
        option("--shape", str, "Model whose config.json to use.", default=shape),
        click.option("--device", default=DEVICE),
        click.option("--seed", default=Settings.seed),
        option("--minutes", float, "Time budget.", default=minutes),
        option("--steps", int, "Step budget.", default=10**9),
        option("--windows", int, "Sequences a step.", default=windows),
        option("--length", int, "Tokens a sequence.", default=1024),
        click.option("--learning-rate", default=learning_rate),
        click.option("--weight-decay", default=Settings.weight_decay),
        click.option("--dropout", default=dropout),
        click.option("--warmup-steps", default=Settings.warmup_steps),
        click.option("--compile/--no-compile", default=False, help="torch.compile the layers."),
        click.option("--checkpoint-steps", default=Settings.checkpoint_steps),
        flag("--resume", "Go on from the checkpoint in --output."),
    )


def self_text_options(minutes: float) -> Decorator:
    """As `write_self_text` has them, one after the other."""
    return together(
        option("--self-text-minutes", float, "How long the target writes text.", default=minutes),
        click.option("--self-text-batch", default=4096),
        option("--self-text-tokens", int, "New tokens a text.", default=384),
    )


# The trained target, and the text that it generates for the draft.
teacher_options = together(
    option("--target target_name", str, "The trained target.", default="zoo:llama"),
    self_text_options(0.8),
)


class Run:
    """What the options of a training say, and its texts."""

    def __init__(
        self,
        data: Path,
        output: Path,
        shape: str,
        device: str,
        self_text_minutes: float = 0.0,
        self_text_batch: int = 0,
        self_text_tokens: int = 0,
        **settings: Any,
    ) -> None:
        self.output, self.folder, self.device = output, resolve_model(shape), torch.device(device)
        self.settings = Settings(**settings)
        self.self_text = self_text_minutes, self_text_batch, self_text_tokens
        torch.manual_seed(self.settings.seed)
        self.training, self.heldout = (
            TokenData.load(data / f"{name}.npz", self.device) for name in ("training", "heldout")
        )

    def written_by(self, teacher: Any) -> TokenData:
        return write_self_text(teacher, self.training, *self.self_text)

    def train(
        self,
        model: Any,
        figures: Callable[[Tensor], dict[str, Tensor]],
        written: TokenData | None = None,
        save_weights: Callable[..., None] = save_model,
    ) -> None:
        """figures: of `[B, T]` tokens, with `loss`. written: text that the target wrote, of which
        half of the sequences are. `save_weights(model, shape, output)` writes the folder
        `output`."""

        def loss(windows: int, length: int) -> Tensor:
            balance(model)
            if written is None:
                return figures(self.training.sample(windows, length + 1))["loss"]
            return figures(mixed(self.training, written, windows, length))["loss"]

        save_best = partial(save_weights, shape=self.folder, output=self.output)
        validation = partial(mean_figures, figures, self.heldout)
        train(model, loss, validation, self.settings, self.output, save_best)

    def target_figures(self, model: Any) -> Callable[[Tensor], dict[str, Tensor]]:
        tokens_per_byte = len(self.heldout.tokens) / self.heldout.num_bytes
        return partial(target_figures, model, tokens_per_byte)


@click.group(context_settings={"show_default": True})
def main() -> None:
    torch.set_float32_matmul_precision("high")


@main.command()
@training_options("zoo:llama", minutes=3.8, learning_rate=2e-3, dropout=0.1)
def target(**options: Any) -> None:
    """Next-token prediction on the training files."""
    run = Run(**options)
    model = build_model(run.folder, run.settings, run.device)
    run.train(model, run.target_figures(model))


@main.command()
@training_options("zoo:llama-draft", minutes=6.7, learning_rate=3e-3, dropout=0.0)
@teacher_options
def draft(target_name: str, **options: Any) -> None:
    """Distillation from the target on the training files and on text that the target generates."""
    run = Run(**options)
    teacher = load_model(target_name, run.device)
    model = build_model(run.folder, run.settings, run.device)
    run.train(model, partial(draft_figures, model, teacher), run.written_by(teacher))


@main.command()
@training_options("zoo:llama-eagle3", minutes=6.0, learning_rate=2e-3, dropout=0.0, windows=32)
@teacher_options
@click.option("--unroll", default=5, help="Steps of a chain in training.")
@click.option("--start", help="A trained head to begin from, also one with fewer layers.")
def eagle3(target_name: str, unroll: int, start: str | None, **options: Any) -> None:
    """An EAGLE-3 head on the target's hidden states, trained on the same text as the draft, or a
    P-EAGLE head (`--shape zoo:llama-peagle --start zoo:llama-eagle3 --unroll 8`)."""
    run = Run(**options)
    teacher, config = load_model(target_name, run.device), target_config(target_name)
    head_shape = read_shape(run.folder, config)
    aligned_chains(run.settings.length, unroll)  # refuses a short --length before text is generated
    own = run.written_by(teacher)
    before = None if start is None else load_head(resolve_model(start), config).to(run.device)
    if before is None:
        ids, share = draft_vocabulary([run.training, own], head_shape)
        print(f"the draft vocabulary covers {share:.1%} of the texts", flush=True)
    else:
        ids = before.draft_ids
    head = build_head(head_shape, teacher, ids, run.settings, before)
    run.train(head, partial(head_figures, head, teacher, unroll), own, save_as)


@main.command()
@training_options(str(SHAPE), minutes=5.0, learning_rate=2e-3, dropout=0.1)
@click.option("--trained", type=FOLDER, help="A trained target; only MTP modules are trained.")
@click.option("--mtp-minutes", default=2.5, help="Time of the MTP modules.")
@click.option("--mtp-steps", default=10**9, help="Step budget of the MTP modules.")
@click.option("--mtp-windows", default=32, help="Sequences a step.")
@click.option("--mtp-dropout", default=0.0)
@click.option("--unroll", default=3, help="Steps of a chain in training.")
@self_text_options(0.6)
def deepseek(trained: Path | None, unroll: int, **options: Any) -> None:
    """A DeepSeek V3 target, then its MTP modules by distillation from it. The target is also left
    in OUTPUT/target."""
    names = ("minutes", "steps", "windows", "dropout")
    of_modules = {name: options.pop(f"mtp_{name}") for name in names}
    run = Run(**options)
    # Refuses a short --length before the target is trained.
    aligned_chains(run.settings.length, unroll)
    output = run.output
    if trained is None:
        run.output = trained = output / "target"
        model = build_target(run.folder, run.settings, run.device)
        run.train(model, run.target_figures(model))
    teacher = load_target(trained, run.device)
    own = run.written_by(teacher)
    run.output, run.settings = output, replace(run.settings, **of_modules)
    modules = build_modules(teacher, run.settings)
    run.train(modules, partial(modules_figures, modules, unroll), own, save_with_modules)


@main.command()
@click.option("--data", type=FOLDER, required=True, help="Folder with training.npz.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--tokens", default=1024, help="How many.")
def token_map(data: Path, output: Path, tokens: int) -> None:
    """The most frequent tokens of the training text, for `speculative_token_map`."""
    text = TokenData.load(data / "training.npz", torch.device("cpu"))
    counts = torch.bincount(text.tokens.int())
    ids = counts.argsort(descending=True, stable=True)[:tokens]
    print(f"{counts[ids].sum() / counts.sum():.1%} of the text", flush=True)
    output.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")


@main.command()
@click.option("--data", type=FOLDER, required=True, help="Folder with heldout.npz.")
@click.option("--target", "target_name", default="zoo:llama")
@click.option("--draft", "draft_name", default="zoo:llama-draft")
@click.option("--output", type=FOLDER, help="Folder for acceptance.json.")
@click.option("--device", default=DEVICE)
@click.option("--prompts", default=256)
@click.option("--new-tokens", default=128)
@click.option("--draft-len", default=4)
@click.option("--mtp-vanilla", is_flag=True, help="An MTP module for each step.")
def evaluate(
    data: Path,
    target_name: str,
    draft_name: str,
    output: Path | None,
    device: str,
    mtp_vanilla: bool,
    **sizes: int,
) -> None:
    """Greedy acceptance length of a draft model, EAGLE-3 head or MTP modules on continuations of
    held-out text. MTP: `--target` and `--draft` are the same folder."""
    on = torch.device(device)
    heldout = TokenData.load(data / "heldout.npz", on)
    teacher, drafting = load_both(target_name, draft_name, on)
    if mtp_vanilla:
        drafting = drafting.vanilla()
    figures = json.dumps(acceptance(teacher, drafting, heldout, **sizes))
    print(figures)
    if output is not None:
        (output / "acceptance.json").write_text(figures + "\n", encoding="utf-8")


def load_model(name: str, device: torch.device) -> Any:
    """A trained model without gradients, in bf16 on a GPU and in fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_language_model(resolve_model(name), dtype, device)


def save_as(head: DraftHead, shape: Path, output: Path) -> None:
    """Saves the head with the config.json of `shape`."""
    save_head(head, (shape / "config.json").read_text(encoding="utf-8"), output)


def target_config(name: str) -> ModelConfig:
    return model_config(resolve_model(name))


def load_both(target: str, draft: str, device: torch.device) -> tuple[Any, Any]:
    """The target, and what drafts for it: its own MTP modules if both names are the same."""
    folder, own = resolve_model(target), resolve_model(draft)
    if folder == own:
        teacher = load_target(folder, device)
        return teacher, NextnModules.from_pretrained(folder, teacher)
    teacher = load_model(target, device)
    if head_kind(own) is None:
        return teacher, load_model(draft, device)
    head = load_head(own, target_config(target)).to(device)
    return teacher, head.eval().requires_grad_(False)


if __name__ == "__main__":
    main()
