"""`tllm-bench prepare-dataset`: writes data sets, of random tokens or of text files."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tllm_spec.cli.bench_options import NOT_NEGATIVE, OUTPUT_FILE, POSITIVE, Model, ModelCommand

if TYPE_CHECKING:
    from tllm_spec.bench.dataset import BenchRequest

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Target:
    """Whose tokens are written, where to, and the seed of all choices."""

    model: Model
    output: Path | None
    seed: int


@click.group(name="prepare-dataset")
@click.option("--output", type=OUTPUT_FILE, help="The file to write; without it, standard output.")
@click.option("--random-seed", "--random_seed", type=int, default=42)
@click.pass_context
def prepare_dataset(context: click.Context, output: Path | None, random_seed: int) -> None:
    """Write a data set for the other commands: one JSON object a line."""
    context.obj = Target(context.obj, output, random_seed)


@prepare_dataset.command("token-norm-dist", cls=ModelCommand)
@click.option("--num-requests", "--num_requests", type=POSITIVE, required=True)
@click.option("--input-mean", "--input_mean", type=POSITIVE, required=True, help="Tokens.")
@click.option("--input-stdev", "--input_stdev", type=NOT_NEGATIVE, default=0)
@click.option("--output-mean", "--output_mean", type=POSITIVE, required=True, help="Tokens.")
@click.option("--output-stdev", "--output_stdev", type=NOT_NEGATIVE, default=0)
@click.pass_obj
def token_norm_dist(
    target: Target,
    num_requests: int,
    input_mean: int,
    input_stdev: int,
    output_mean: int,
    output_stdev: int,
) -> None:
    """Random token ids; the lengths are normally distributed."""
    from tllm_spec.bench.prepare import LengthDistribution, synthetic_requests
    from tllm_spec.tokenizer import load_tokenizer

    vocab_size = len(load_tokenizer(target.model.path).get_vocab())
    inputs, outputs = (
        LengthDistribution(input_mean, input_stdev),
        LengthDistribution(output_mean, output_stdev),
    )
    write(target, synthetic_requests(num_requests, inputs, outputs, vocab_size, target.seed))


@prepare_dataset.command("text", cls=ModelCommand)
@click.option("--folder", type=EXISTING_FOLDER, help="Where the files are, at any depth.")
@click.option("--glob", "pattern", default="*", help="Only files of this name, as in '*.py'.")
@click.option(
    "--heldout", is_flag=True, help="Instead of a folder: the files no zoo model was trained on."
)
@click.option("--num-requests", "--num_requests", type=POSITIVE, required=True)
@click.option(
    "--input-len", "--input_len", type=POSITIVE, required=True, help="Tokens of every prompt."
)
@click.option(
    "--output-len", "--output_len", type=POSITIVE, required=True, help="Tokens to generate."
)
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
    """Pieces of text files, cut at a number of tokens."""
    from tllm_spec.bench.prepare import text_requests
    from tllm_spec.tokenizer import load_tokenizer
    from tllm_spec.zoo.corpus import heldout_files

    if (folder is None) != heldout:
        raise ValueError("prepare-dataset text reads either --folder FOLDER or --heldout")
    found = (
        (path for path in sorted(folder.rglob("*")) if path.is_file())
        if folder
        else heldout_files()
    )
    files = [path for path in found if path.match(pattern)]
    # It warns of texts longer than the model's context; ours are cut afterwards.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    encode = load_tokenizer(target.model.path).encode
    write(target, text_requests(files, encode, num_requests, input_len, output_len, target.seed))


def write(target: Target, requests: Iterable["BenchRequest"]) -> None:
    """Nothing is written before the last request could be made."""
    from tllm_spec.bench.dataset import write_dataset

    lines = list(requests)
    with click.open_file(target.output or "-", "w", encoding="utf-8") as file:
        write_dataset(lines, file)
