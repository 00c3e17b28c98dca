"""`tllm-train`: trains draft heads for a target on its own traffic."""

import logging
from pathlib import Path
from typing import Any

import click

from tllm_spec.cli.version import flag, option
from tllm_spec.progress import show_lines

POSITIVE = click.IntRange(min=1)


@click.group()
def main() -> None:
    """Train drafters. Under torchrun each process trains on a device of its own."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    show_lines()


@main.command()
@option("--model", str, "The target: folder, GGUF file or zoo model.", required=True)
@option(
    "--data",
    click.Path(exists=True, path_type=Path),
    "Folder that --record_traffic wrote, or a text file. [needed without --follow]",
)
@option(
    "--follow",
    click.Path(exists=True, file_okay=False, path_type=Path),
    "Folder that --record_traffic writes with --record_hidden_states: train again and again on its "
    "newest texts. Each turn has --steps or --minutes, and a folder in --output.",
)
@option("--newest", POSITIVE, "With --follow: texts that a turn reads. [default: 512]")
@option("--turns", POSITIVE, "With --follow: its turns. [default: until it is interrupted]")
@option("--base_url", str, "With --follow: URL, with its /v1, of the server that takes each head.")
@option("--api_key", str, "Key of its operator.", envvar="OPENAI_API_KEY")
@option(
    "--output",
    click.Path(file_okay=False, path_type=Path),
    "Folder for the best head so far and the checkpoint.",
    required=True,
)
@option("--init start", str, "Head whose shape and weights to begin with. [default: a new head]")
@option(
    "--adapter",
    str,
    "NAME=FOLDER of a LoRA adapter of the target: train a LoRA of the head in --init on the "
    "recorded texts with it, which are read alone.",
)
@option("--rank", POSITIVE, "With --adapter: of the head's LoRA. [default: 16]")
@option(
    "--kind",
    click.Choice(["eagle3", "peagle"]),
    "EAGLE-3, or P-EAGLE, which drafts all tokens at once. [default: as --init, or eagle3]",
)
@option(
    "--format",
    click.Choice(["eagle", "speculators"]),
    "Format of EAGLE's authors, or of speculators. [default: eagle; for peagle: speculators]",
)
@option(
    "--draft_vocab_size",
    POSITIVE,
    "How many of the most frequent tokens the head drafts. [default: 32000, or all]",
)
@option("--layers", POSITIVE, "Layers of a new head. [default: 1; for peagle: 2]")
@option(
    "--norm norms",
    click.Choice(["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"]),
    "A further norm of a new head; may be given several times.",
    multiple=True,
)
@option(
    "--unroll",
    POSITIVE,
    "Drafts of a chain in training, as many as are served. [default: 5; 3 on a CPU]",
)
@option("--steps", POSITIVE, "Number of steps.")
@option("--minutes", click.FloatRange(0, min_open=True), "Time limit.")
@option(
    "--batch_tokens",
    POSITIVE,
    "Tokens of a step, padding included. [default: 16384, on a CPU 1024, and no more than an "
    "eighth of the texts have]",
)
@option(
    "--learning_rate",
    float,
    "Highest step size of AdamW, after a warm-up; it falls to 2% of it. [default: of a new "
    "head 5e-4, or 2e-3 below a hidden size of 1024; with --init 5e-4 for 16384 --batch_tokens, "
    "and less for smaller batches]",
)
@option(
    "--checkpoint_steps",
    POSITIVE,
    "Steps from one validation on held-out texts and checkpoint to the next. [default: 500, "
    "and each tenth of the run, on a CPU each fifth]",
)
@flag("--resume", "Go on from the checkpoint in --output.")
@option(
    "--dtype",
    click.Choice(["bf16", "float32"]),
    "Type of GEMMs; the optimizer has float32. [default: bf16 on CUDA]",
)
@option(
    "--device", click.Choice(["cuda", "cpu"]), "Device to train on. [default: cuda if available]"
)
def head(
    dtype: str | None,
    device: str | None,
    follow: Path | None,
    newest: int | None,
    turns: int | None,
    base_url: str | None,
    api_key: str | None,
    **options: Any,
) -> None:
    """Train a head on the target's hidden states.

    Every 20th text is held out; each line has its acceptance, with the standard error. At the end
    the held-out records of a traffic folder are replayed."""
    if options["steps"] is None and options["minutes"] is None:
        raise click.UsageError("Give --steps or --minutes.")
    if (follow is None) == (options["data"] is None):
        raise click.UsageError("Give either --data or --follow.")
    if follow is None and (newest or turns or base_url):
        raise click.UsageError("--newest, --turns and --base_url need --follow.")
    if follow is not None and options["adapter"] is not None:
        raise click.UsageError("--follow trains the head of all requests, without --adapter.")
    import torch

    from tllm_spec.training import follow as following
    from tllm_spec.training.head_run import HeadOptions, train_head

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options["dtype"] = dtype or ("bf16" if device == "cuda" else "float32")
    options["unroll"] = options["unroll"] or (5 if device == "cuda" else 3)
    try:
        if follow is None:
            train_head(HeadOptions(**options, device=device))
        else:
            own = HeadOptions(**options | {"data": follow}, device=device)
            following.follow(own, newest or following.NEWEST, turns, base_url, api_key)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
