"""`tllm-bench`: throughput, latency, comparisons and data sets, in the manner of trtllm-bench.

Only the command line is here. `tllm_spec.bench` does the work and is imported when a command runs.
"""

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tllm_spec.cli import bench_options
from tllm_spec.cli.bench_options import (
    EXISTING_FILE,
    NOT_NEGATIVE,
    POSITIVE,
    EngineCommand,
    Model,
    write_bytes,
    write_json,
    write_text,
)
from tllm_spec.cli.bench_serve import prepare_dataset, serve
from tllm_spec.cli.bench_traffic import adaptive_replay, break_even, erase_traffic, replay, tune
from tllm_spec.cli.llm_flags import either_spelling, ignored_option, read_flags, refused_together
from tllm_spec.cli.version import flag, log_level_option, option, version_option
from tllm_spec.progress import show_lines
from tllm_spec.zoo.registry import resolve_model

if TYPE_CHECKING:
    from tllm_spec.bench.dataset import BenchRequest
    from tllm_spec.sampling_params import SamplingParams

CONCURRENCY = click.IntRange(min=-1)  # 0 and -1 both mean "no limit"


MAX_SUMMARY = 200  # characters of a command's first sentence


class FriendlyGroup(click.Group):
    """Reports a user's mistake (ValueError) as a sentence; `--log_level debug` adds the
    traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            logging.getLogger(__name__).debug("raised here:", exc_info=error)
            raise click.ClickException(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in whole sentences, where click would cut each to one line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=MAX_SUMMARY))
                    for name, command in sorted(self.commands.items())
                ]
            )


@click.group(
    cls=FriendlyGroup,
    context_settings={"show_default": True, "token_normalize_func": either_spelling},
    epilog="Options may be spelled with - or _. TensorRT-LLM's other options are accepted with the "
    "values that this engine supports, and refused with the reason otherwise.",
)
@option("--model -m", str, "A checkpoint's folder, a GGUF file, or a zoo model, such as zoo:llama.")
@option(
    "--model_path",
    str,
    "The checkpoint's folder, when --model is only the name for reports. [default: --model]",
)
@option(
    "--workspace -w",
    str,
    "Accepted without effect: no intermediate files are written.",
    expose_value=False,
    hidden=True,
)
@log_level_option("warning")
@version_option("tllm-bench")
@ignored_option("--hf_revision", "--revision")
@click.pass_context
def main(
    context: click.Context, /, model: str | None, model_path: str | None, log_level: str
) -> None:
    """Benchmark a model, and what it gains from speculative decoding."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    show_lines()
    context.obj = None if model is None else Model(model, model_path or model)


for _each in (prepare_dataset, adaptive_replay, break_even, serve, erase_traffic, replay, tune):
    main.add_command(_each)


def _sweep(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    return [CONCURRENCY(each, option, context) for each in text.split(",")]


def _existing_model(
    context: click.Context, option: click.Parameter, value: str | None
) -> str | None:
    if value is not None:
        resolve_model(value)
    return value


def _one_at_a_time(context: click.Context, option: click.Parameter, value: int) -> int:
    if value != 1:
        raise click.BadParameter(
            f"{value} is refused: latency runs one request after another; accepted: 1. "
            "throughput --streaming takes any concurrency"
        )
    return value


@main.command(cls=EngineCommand)
@bench_options.workload_options
@bench_options.max_batch_size_option
@bench_options.engine_options
@bench_options.yaml_option
@bench_options.warmup_option
@option(
    "--concurrency", CONCURRENCY, "Maximum number of requests in flight; -1: no limit.", default=-1
)
@bench_options.streaming_option
@bench_options.record_options
@click.pass_obj
def throughput(model: Model, /, **options: Any) -> None:
    """Measure tokens and requests per second with many requests in flight."""
    measure(model, **options)


@main.command(cls=EngineCommand)
@bench_options.workload_options
@bench_options.engine_options
@bench_options.yaml_option
@bench_options.warmup_option
@option(
    "--concurrency", int, "Only 1: one request after another.", default=1, callback=_one_at_a_time
)
@bench_options.record_options
@click.pass_obj
def latency(model: Model, /, **options: Any) -> None:
    """Measure the times of requests that are streamed one after another."""
    measure(model, max_batch_size=1, streaming=True, **options)


def measure(
    model: Model,
    *,
    yaml_path: Path | None,
    warmup: int,
    concurrency: int,
    streaming: bool,
    report_json: Path | None,
    output_json: Path | None,
    request_json: Path | None,
    iteration_log: Path | None,
    **options: Any,
) -> None:
    from tllm_spec.bench import report as reports
    from tllm_spec.bench.report import format_report
    from tllm_spec.bench.runner import run_requests, warm_up
    from tllm_spec.llm import LLM

    requests, sampling, (arguments,) = prepared(model, [yaml_path], **options)
    if iteration_log is not None:  # read at the end, so no round may be dropped before
        arguments |= {"enable_iter_perf_stats": True, "max_stats_len": sys.maxsize}
    with LLM(model.path, **arguments) as llm:
        warm_up(llm, requests, sampling, concurrency, warmup)
        before = llm.server_info()
        if iteration_log is not None:
            llm.get_stats()  # drop the rounds of the warm-up
        run = run_requests(llm, requests, sampling, concurrency, streaming)
        rounds = llm.get_stats() if iteration_log is not None else []
        report = reports.build_report(
            model.name, llm.args, run, streaming, (before, llm.server_info())
        )
    click.echo(format_report(report))
    write_json(report_json, report)
    write_json(output_json, reports.output_records(run.outputs))
    write_json(request_json, reports.request_records(run.outputs, streaming))
    if iteration_log is not None:
        write_text(iteration_log, "".join(f"{json.dumps(each)}\n" for each in rounds))


def prepared(
    model: Model,
    yaml_paths: Sequence[Path | None],
    *,
    dataset: Path,
    num_requests: int,
    target_output_len: int | None,
    eos_id: int,
    sampler_options: Path | None,
    **flags: Any,
) -> "tuple[list[BenchRequest], list[SamplingParams], list[dict[str, Any]]]":
    """The requests and their sampling, and LLM's keyword arguments for each YAML file. Raises
    ValueError with every option and key that is refused."""
    from tllm_spec.bench.dataset import read_dataset
    from tllm_spec.bench.runner import arguments_of, sampling_for
    from tllm_spec.config.llm_args import LlmArgs
    from tllm_spec.config.option_checks import read_yaml

    given, refusals = read_flags(flags)
    arguments = [arguments_of(model.path, given, path, len(yaml_paths)) for path in yaml_paths]
    with refused_together(refusals):
        for each in arguments:
            LlmArgs.from_kwargs(model.path, **each)
    requests = read_dataset(dataset, num_requests)
    if target_output_len is not None:
        requests = [replace(each, output_tokens=target_output_len) for each in requests]
    sampler = None if sampler_options is None else read_yaml(sampler_options)
    return requests, sampling_for(requests, sampler, eos_id), arguments


@main.command(cls=EngineCommand)
@click.argument("configs", nargs=-1, required=True, type=EXISTING_FILE)
@bench_options.workload_options
@bench_options.max_batch_size_option
@bench_options.engine_options
@option(
    "--concurrency",
    str,
    "Maximum number of requests in flight; -1: no limit. Several, such as 1,8,64, are run in turn.",
    callback=_sweep,
    default="1",
)
@bench_options.streaming_option
@option(
    "--repeat", POSITIVE, "Measured runs of each configuration; the table shows medians.", default=3
)
@option(
    "--warmup -w", NOT_NEGATIVE, "Runs of each configuration before the measured ones.", default=1
)
@option("--show_text", NOT_NEGATIVE, "Number of generated texts to print.", default=0)
@flag("--allow_differences", "Exit with status 0 even when texts differ.")
@option(
    "--with_model",
    str,
    "Another model, such as a quantised copy. Every YAML file runs with both, and a table has "
    "the shares of equal tokens in their outputs and of equal first choices in the prompts, and "
    "the perplexities of the prompts.",
    callback=_existing_model,
)
@bench_options.report_json_option
@bench_options.plot_option
@click.pass_obj
def compare(
    model: Model,
    /,
    configs: tuple[Path, ...],
    with_model: str | None,
    concurrency: list[int],
    streaming: bool,
    repeat: int,
    warmup: int,
    show_text: int,
    allow_differences: bool,
    report_json: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Run the same requests through several YAML files of LLM arguments. The first is the baseline.

    All engines are in memory together and take turns. Prompts stay in the prefix cache from run to
    run unless a file sets `kv_cache_config.enable_block_reuse: false`, so mostly decoding is
    compared. Exits with status 1 when texts of a model differ at the same concurrency.
    """
    from tllm_spec.bench.compare import Contestant, comparison, differences, fidelity, run_in_turn
    from tllm_spec.bench.plot import comparison_curves, draw, image, title_of
    from tllm_spec.bench.report import FIDELITY, format_comparison, format_rows, format_texts
    from tllm_spec.llm import LLM

    paths = [model.path, *([with_model] if with_model else [])]
    requests, sampling, arguments = prepared(model, configs * len(paths), **options)
    entrants = entrants_of(paths, configs)
    rows, found = [], []
    with ExitStack() as stack:
        engines = [
            stack.enter_context(LLM(path, **each))
            for (path, _), each in zip(entrants, arguments, strict=True)
        ]
        for limit in concurrency:
            contestants = [
                Contestant(name, engine, limit)
                for (_, name), engine in zip(entrants, engines, strict=True)
            ]
            run_in_turn(contestants, requests, sampling, repeat, warmup, streaming)
            rows += comparison(contestants, streaming)
            found += differences(contestants, requests)
        models = fidelity(contestants[:: len(configs)], requests) if with_model else []
        outputs = contestants[0].runs[0].outputs[:show_text]
        shown = [*format_texts(outputs, engines[0].tokenizer), format_comparison(rows)]
        shown += [format_rows(FIDELITY, models)] if models else []
    click.echo("\n".join([*shown, *map(str, found)]))
    if plot is not None:
        write_bytes(plot, image(draw(comparison_curves(rows), title_of(model.name)), plot.suffix))
    lists = {"configurations": rows, "differences": [vars(each) for each in found]}
    write_json(report_json, lists | {"models": models})
    if found and not allow_differences:
        raise SystemExit(1)
    if not found:
        sizes = len(requests), repeat, len(concurrency), len(paths)
        click.echo(equal_texts(names_of(configs), *sizes))


def entrants_of(paths: Sequence[str], configs: Sequence[Path]) -> list[tuple[str, str]]:
    """Every model with every file: the model's path, and the configuration's name."""
    return [
        (path, name if path == paths[0] else f"{name} ({Path(path).name})")
        for path, name in product(paths, names_of(configs))
    ]


def equal_texts(
    names: Sequence[str], num_texts: int, repeat: int, num_concurrencies: int, num_models: int
) -> str:
    """The sentence on a comparison that found no difference."""
    where = " with each model" if num_models > 1 else ""
    where += " at each concurrency" if num_concurrencies > 1 else ""
    if len(names) == repeat == 1:
        return (
            f"No texts were compared: {names[0]} ran once{where}. A second file or --repeat 2 "
            "compares them."
        )
    subject = names[0] if len(names) == 1 else f"All {len(names)} configurations"
    return f"{subject} gave the same {num_texts} texts in every run{where}."


def names_of(configs: Sequence[Path]) -> list[str]:
    """The files' names without folder and suffix; a repeated name gets the file's number."""
    stems = [path.stem for path in configs]
    return [
        stem if stems.index(stem) == number else f"{stem}#{number + 1}"
        for number, stem in enumerate(stems)
    ]


if __name__ == "__main__":
    main()
