"""`tllm-bench prepare-dataset`: writes data sets of random tokens or of pieces of text files."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tllm_spec.cli.bench_options import (
    EXISTING_FOLDER,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    POSITIVE,
    Model,
    ModelCommand,
    write_text,
)
from tllm_spec.cli.llm_flags import ignored_option
from tllm_spec.cli.version import Decorator, flag, option

if TYPE_CHECKING:
    from tllm_spec.bench.dataset import BenchRequest, Lengths


@dataclass(frozen=True)
class Target:
    """The model whose tokenizer is used, the file to write, and the random seed."""

    model: Model
    output: Path | None
    seed: int


@click.group(name="prepare-dataset")
@option("--output", OUTPUT_FILE, "File to write. [default: standard output]")
@option("--random-seed", int, "Seed of all random choices.", default=42)
@ignored_option("--task_id", type=int)
@click.pass_context
def prepare_dataset(context: click.Context, /, output: Path | None, random_seed: int) -> None:
    """Write a data set for the other commands: one JSON object a line."""
    context.obj = Target(context.obj, output, random_seed)


def length_option(name: str, text: str) -> Decorator:
    return click.option(name, type=POSITIVE, required=True, help=text)


num_requests_option = length_option("--num-requests", "Number of requests to write.")


@prepare_dataset.command("token-norm-dist", cls=ModelCommand)
@num_requests_option
@length_option("--input-mean", "Mean length of a prompt, in tokens.")
@option("--input-stdev", NOT_NEGATIVE, "Standard deviation of the prompt length.", default=0)
@length_option("--output-mean", "Mean length of an output, in tokens.")
@option("--output-stdev", NOT_NEGATIVE, "Standard deviation of the output length.", default=0)
@click.pass_obj
def token_norm_dist(target: Target, /, num_requests: int, **lengths: int) -> None:
    """Random token ids with normally distributed lengths."""
    from tllm_spec.bench.dataset import normal_lengths

    sides = (
        normal_lengths(lengths[f"{kind}_mean"], lengths[f"{kind}_stdev"])
        for kind in ("input", "output")
    )
    write_random_tokens(target, num_requests, *sides)


@prepare_dataset.command("token-unif-dist", cls=ModelCommand)
@num_requests_option
@length_option("--input-min", "Shortest length of a prompt, in tokens.")
@length_option("--input-max", "Longest length of a prompt, in tokens.")
@length_option("--output-min", "Shortest length of an output, in tokens.")
@length_option("--output-max", "Longest length of an output, in tokens.")
@click.pass_obj
def token_unif_dist(target: Target, /, num_requests: int, **lengths: int) -> None:
    """Random token ids with uniformly distributed lengths, both bounds included."""
    from tllm_spec.bench.dataset import uniform_lengths

    sides = []
    for kind in ("input", "output"):
        low, high = lengths[f"{kind}_min"], lengths[f"{kind}_max"]
        if low > high:
            raise ValueError(f"--{kind}-min {low} exceeds --{kind}-max {high}")
        sides.append(uniform_lengths(low, high))
    write_random_tokens(target, num_requests, *sides)


def write_random_tokens(
    target: Target, num_requests: int, inputs: "Lengths", outputs: "Lengths"
) -> None:
    from tllm_spec.bench.dataset import synthetic_requests
    from tllm_spec.text.tokenizer import load_tokenizer

    vocab_size = len(load_tokenizer(target.model.path).get_vocab())
    write(target, synthetic_requests(num_requests, inputs, outputs, vocab_size, target.seed))


@prepare_dataset.command(
    "real-dataset",
    context_settings={"ignore_unknown_options": True},
    short_help="Refused: data sets are not downloaded.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def real_dataset(arguments: tuple[str, ...]) -> None:
    """Refused: TensorRT-LLM downloads a data set from Hugging Face here, and this program downloads
    nothing. Use `text`."""
    raise ValueError(
        "prepare-dataset real-dataset is refused: data sets are not downloaded; "
        "prepare-dataset text --folder FOLDER reads local files"
    )


@prepare_dataset.command("text", cls=ModelCommand)
@option("--folder", EXISTING_FOLDER, "Folder with the files, at any depth.")
@option("--glob pattern", str, "Only files whose name matches, such as '*.py'.", default="*")
@flag("--heldout", "Instead of --folder: the files that no zoo model was trained on.")
@num_requests_option
@length_option("--input-len", "Length of a prompt, in tokens.")
@length_option("--output-len", "Length of an output, in tokens.")
@click.pass_obj
def text(
    target: Target,
    folder: Path | None,
    pattern: str,
    heldout: bool,
    num_requests: int,
    input_len: int,
    output_len: int,
) -> None:
    """Pieces of text files, all of the same length."""
    from tllm_spec.bench.dataset import text_requests
    from tllm_spec.text.tokenizer import load_tokenizer
    from tllm_spec.zoo.corpus import heldout_files

    if (folder is None) != heldout:
        raise ValueError("prepare-dataset text reads either --folder FOLDER or --heldout")
    found = (
        (path for path in sorted(folder.rglob("*")) if path.is_file())
        if folder
        else heldout_files()
    )
    files = [path for path in found if path.match(pattern)]
    # It warns of texts longer than the model's context; these are cut after tokenisation.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    encode = load_tokenizer(target.model.path).encode
    write(target, text_requests(files, encode, num_requests, input_len, output_len, target.seed))


def write(target: Target, requests: Iterable["BenchRequest"]) -> None:
    """Writes the requests once all are made: an error leaves no partial file."""
    from tllm_spec.bench.dataset import write_dataset

    lines = StringIO()
    write_dataset(requests, lines)
    if target.output is None:
        click.echo(lines.getvalue(), nl=False)
    else:
        write_text(target.output, lines.getvalue())
