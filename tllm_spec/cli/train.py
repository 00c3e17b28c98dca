"""`tllm-train`: trains draft heads for a target on its own traffic."""

import math
from pathlib import Path
from typing import Any

import click

POSITIVE = click.IntRange(min=1)


@click.group()
def main() -> None:
    """Train drafters. Under torchrun each process trains on a device of its own."""


@main.command()
@click.option("--model", required=True, help="The target: folder, GGUF file or zoo model.")
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Folder that --record_traffic wrote, or a text file.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the best head so far and the checkpoint.",
)
@click.option(
    "--init", "start", help="Head whose shape and weights to begin with. [default: a new head]"
)
@click.option(
    "--kind",
    type=click.Choice(["eagle3", "peagle"]),
    help="EAGLE-3, or P-EAGLE, which drafts all tokens at once. [default: as --init, or eagle3]",
)
@click.option(
    "--format",
    type=click.Choice(["eagle", "speculators"]),
    help="Format of EAGLE's authors, or of speculators. [default: eagle; for peagle: speculators]",
)
@click.option(
    "--draft_vocab_size",
    type=POSITIVE,
    help="How many of the most frequent tokens the head drafts. [default: 32000, or all]",
)
@click.option("--layers", type=POSITIVE, help="Layers of a new head. [default: 1; for peagle: 2]")
@click.option(
    "--norm",
    "norms",
    type=click.Choice(["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"]),
    multiple=True,
    help="A further norm of a new head; may be given several times.",
)
@click.option(
    "--unroll", type=POSITIVE, default=5, show_default=True, help="Drafts of a chain in training."
)
@click.option("--steps", type=POSITIVE, help="Number of steps.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Time limit.")
@click.option("--batch_tokens", type=POSITIVE, default=16384, show_default=True)
@click.option("--learning_rate", type=float, default=5e-4, show_default=True)
@click.option("--checkpoint_steps", type=POSITIVE, default=500, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --output.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "float32"]),
    help="Type of GEMMs; the optimizer has float32. [default: bf16 on CUDA]",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Device to train on. [default: cuda if available]",
)
def head(
    steps: int | None,
    minutes: float | None,
    batch_tokens: int,
    learning_rate: float,
    checkpoint_steps: int,
    resume: bool,
    dtype: str | None,
    device: str | None,
    **options: Any,
) -> None:
    """Train a head on the target's hidden states.

    Every 20th text is held out; each line has its acceptance."""
    if steps is None and minutes is None:
        raise click.UsageError("Give --steps or --minutes.")
    import torch

    from tllm_spec.training.head_run import HeadOptions, train_head
    from tllm_spec.training.trainer import Settings

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options["dtype"] = dtype or ("bf16" if device == "cuda" else "float32")
    settings = Settings(
        minutes=minutes or math.inf,
        steps=steps or 10**9,
        windows=batch_tokens,
        length=1,
        learning_rate=learning_rate,
        weight_decay=0.1,
        dropout=0.0,
        warmup_steps=200,
        compile=False,
        checkpoint_steps=checkpoint_steps,
        seed=0,
        resume=resume,
    )
    try:
        train_head(HeadOptions(**options, device=device), settings)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
