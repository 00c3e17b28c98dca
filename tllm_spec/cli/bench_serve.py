"""`tllm-bench prepare-dataset`, which writes data sets of random tokens or of pieces of text files,
and `tllm-bench serve`, which measures any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tllm_spec.cli.bench_options import (
    DATASET,
    EXISTING_FILE,
    EXISTING_FOLDER,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    POSITIVE,
    Model,
    ModelCommand,
    count,
    plot_option,
    positive,
    report_json_option,
    several,
    write_bytes,
    write_json,
    write_text,
)
from tllm_spec.cli.llm_flags import ignored_option
from tllm_spec.cli.version import Decorator, flag, option

if TYPE_CHECKING:
    from tllm_spec.bench.dataset import BenchRequest, Lengths
    from tllm_spec.bench.plot import LoadPoint


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
    target: Target, num_requests: int, inputs: Lengths, outputs: Lengths
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
    found = sorted(folder.rglob("*")) if folder else heldout_files()
    files = [path for path in found if path.is_file() and path.match(pattern)]
    # It warns of texts longer than the model's context; these are cut after tokenisation.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    encode = load_tokenizer(target.model.path).encode
    write(target, text_requests(files, encode, num_requests, input_len, output_len, target.seed))


def write(target: Target, requests: Iterable[BenchRequest]) -> None:
    """Writes the requests once all are made: an error leaves no partial file."""
    from tllm_spec.bench.dataset import write_dataset

    lines = StringIO()
    write_dataset(requests, lines)
    if target.output is None:
        click.echo(lines.getvalue(), nl=False)
    else:
        write_text(target.output, lines.getvalue())


# `tllm-bench serve`: measures any server with OpenAI's API.


@click.command()
@option("--base_url", str, "URL of the API, with its /v1.", default="http://localhost:8000/v1")
@option("--served_model", str, "The model's name. [default: the first of /v1/models]")
@option("--api_key", str, "Key that is sent as a bearer token.", envvar="OPENAI_API_KEY")
@option(
    "--dataset",
    DATASET,
    "File of prepare-dataset or with messages of a chat, or a folder of recorded traffic.",
    required=True,
)
@option(
    "--num_requests",
    click.IntRange(0),
    "Number of requests to take from the top of the data set; 0: all.",
    default=0,
)
@option(
    "--request_rate",
    str,
    "Arrivals per second; several, such as 1,2,4, are run in turn.",
    callback=several(positive, "numbers above 0 such as 1,2,4"),
)
@option(
    "--burstiness",
    click.FloatRange(min=0, min_open=True),
    "Shape of the gaps between arrivals: 1 is Poisson, less comes in bursts.",
    default=1.0,
)
@option(
    "--concurrency",
    str,
    "Requests in flight at most; several, such as 1,8,64, are run in turn. [default: 1, or no "
    "limit with --request_rate]",
    callback=several(count, "integers above 0 such as 1,8,64"),
)
@option("--seed", int, "Seed of the arrival times.", default=0)
@option(
    "--goodput",
    str,
    "Counts requests within a limit, such as ttft:200, tpot:20 or e2el:5000; may be repeated.",
    multiple=True,
    metavar="NAME:MS",
)
@option(
    "--sampling",
    str,
    'Further keys of each body, as JSON: {"temperature": 0.8, "top_k": 5}. Without a '
    "temperature it is 0, so that text is greedy as in the other commands.",
    default="{}",
)
@option("--warmup", click.IntRange(0), "Number of requests before the measured ones.", default=1)
@plot_option
@option(
    "--plot_reports",
    EXISTING_FILE,
    "Earlier --report_json file, such as that of another server, to draw too; may be repeated.",
    multiple=True,
)
@option(
    "--label", str, "Name of the curve. [default: the name of the --report_json file, or the URL]"
)
@flag("--quiet", "No progress bar.")
@report_json_option
def serve(
    report_json: Path | None,
    plot: Path | None,
    plot_reports: tuple[Path, ...],
    label: str | None,
    sampling: str,
    goodput: tuple[str, ...],
    **given: Any,
) -> None:
    """Measure a server with OpenAI's API: times to tokens, throughput, goodput and acceptance."""
    from tllm_spec.bench.plot import draw, image, serve_curve, title_of
    from tllm_spec.bench.serve_load import format_serve, parse_goals

    goals = parse_goals(goodput)
    label = label or (report_json.stem if report_json else given["base_url"])
    curves = _earlier_curves(plot, plot_reports, label)
    try:
        options = json.loads(sampling)
    except ValueError as error:
        raise ValueError(f"sampling = {sampling!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"sampling = {sampling!r}: a JSON object is needed")
    options = {"temperature": 0, **options}
    try:
        reports = asyncio.run(_measure(goals, options, **given))
    except OSError as error:
        raise ValueError(f"base_url = {given['base_url']!r}: {error}") from error
    click.echo(format_serve(reports))
    write_json(report_json, {"label": label, "base_url": given["base_url"], "loads": reports})
    if plot is not None:
        curves[label] = serve_curve(reports)
        title = title_of(given["served_model"] or given["base_url"])
        write_bytes(plot, image(draw(curves, title), plot.suffix))
    if failed := sum(report["failed"] for report in reports):
        causes = next(report["errors"] for report in reports if report["failed"])
        raise ValueError(f"{failed} requests have failed: {'; '.join(causes)}")


def _earlier_curves(
    plot: Path | None, plot_reports: Sequence[Path], label: str
) -> dict[str, list[LoadPoint]]:
    """Raises ValueError without --plot, for a file that is no report, and for a name that two
    curves would have."""
    from tllm_spec.bench.plot import read_serve_report

    if plot_reports and plot is None:
        raise ValueError("plot_reports is refused without --plot, which names the file to draw to")
    curves: dict[str, list[LoadPoint]] = {}
    for path in plot_reports:
        name, curve = read_serve_report(path)
        if name in (label, *curves):
            raise ValueError(f"label = {name!r} in {str(path)!r} is another curve's, too")
        curves[name] = curve
    return curves


async def _measure(
    goals: dict[str, float],
    options: dict[str, Any],
    *,
    base_url: str,
    served_model: str | None,
    api_key: str | None,
    dataset: Path,
    num_requests: int,
    request_rate: list[float] | None,
    burstiness: float,
    concurrency: list[int] | None,
    seed: int,
    warmup: int,
    quiet: bool,
) -> list[dict[str, Any]]:
    from tllm_spec.bench.dataset import read_dataset
    from tllm_spec.bench.serve_load import HttpError, Load, Target, get, send_all, serve_report
    from tllm_spec.progress import progress

    target, requests = Target(base_url, api_key), read_dataset(dataset, num_requests)

    async def metrics() -> str | None:
        try:
            return (await get(target, f"{target.root}/metrics")).decode()
        except HttpError:
            return None  # the server has none

    if served_model is None:
        try:
            models = json.loads(await get(target, f"{target.api}/models"))
        except HttpError as error:
            raise ValueError(f"base_url = {base_url!r}: {error}") from error
        served_model = models["data"][0]["id"]
    limits: Sequence[int | None] = concurrency or ([None] if request_rate else [1])
    rates: Sequence[float | None] = request_rate or [None]
    loads = [Load(rate, burstiness, limit, seed) for rate in rates for limit in limits]
    if warmup:
        await send_all(target, served_model, requests[:1] * warmup, Load(concurrency=1), options)
    reports = []
    for load in loads:
        before = await metrics()
        with progress(load.name, len(requests), "requests", is_shown=not quiet) as bar:
            run = await send_all(target, served_model, requests, load, options, bar.advance)
        after = await metrics()
        both = None if before is None or after is None else (before, after)
        reports.append(serve_report(run, goals, both))
    return reports
