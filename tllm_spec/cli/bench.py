"""`tllm-bench`: speed, latency, comparisons and data sets, in the manner of trtllm-bench.

Only the command line is here; `tllm_spec.bench` does the work and is imported when a command runs.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tllm_spec.cli import bench_options
from tllm_spec.cli.bench_adaptive import adaptive_replay
from tllm_spec.cli.bench_break_even import break_even
from tllm_spec.cli.bench_dataset import prepare_dataset
from tllm_spec.cli.bench_options import (
    EXISTING_FILE,
    NOT_NEGATIVE,
    POSITIVE,
    Model,
    ModelCommand,
    write_json,
)

CONCURRENCY = click.IntRange(min=-1)  # 0 and -1 both mean "no limit"
LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])


class FriendlyGroup(click.Group):
    """Ends a user's mistake (ValueError) as one sentence; `--log_level debug` shows where it was
    found."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            logging.getLogger(__name__).debug("found here:", exc_info=error)
            raise click.ClickException(str(error)) from error


@click.group(cls=FriendlyGroup, context_settings={"show_default": True})
@click.option("--model", "-m", help="A checkpoint's folder or a zoo model, such as zoo:llama.")
@click.option("--model_path", help="The folder, if --model is only the name that the report shows.")
@click.option("--log_level", type=LOG_LEVELS, default="warning")
@click.pass_context
def main(context: click.Context, model: str | None, model_path: str | None, log_level: str) -> None:
    """Measure a model, and what speculative decoding gains it."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if model is not None:
        context.obj = Model(model, model_path or model)


main.add_command(prepare_dataset)
main.add_command(adaptive_replay)
main.add_command(break_even)


@main.command(cls=ModelCommand)
@bench_options.workload_options
@bench_options.max_batch_size_option
@bench_options.engine_options
@bench_options.yaml_option
@bench_options.warmup_option
@click.option(
    "--concurrency", type=CONCURRENCY, default=-1, help="Requests under way at a time; -1 = all."
)
@click.option(
    "--streaming", is_flag=True, help="Take the tokens as they come, and report their times."
)
@bench_options.record_options
@click.pass_obj
def throughput(model: Model, /, **options: Any) -> None:
    """Tokens and requests per second with many requests at once."""
    measure(model, **options)


@main.command(cls=ModelCommand)
@bench_options.workload_options
@bench_options.engine_options
@bench_options.yaml_option
@bench_options.warmup_option
@bench_options.record_options
@click.pass_obj
def latency(model: Model, /, **options: Any) -> None:
    """Times of requests that run one after another and are streamed."""
    measure(model, max_batch_size=1, concurrency=1, streaming=True, **options)


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
    **options: Any,
) -> None:
    from tllm_spec.bench import report as reports
    from tllm_spec.bench.options import split_options
    from tllm_spec.bench.runner import run_requests, warm_up
    from tllm_spec.bench.table import format_report
    from tllm_spec.llm import LLM

    workload, engine = split_options(options)
    requests = workload.requests()
    sampling = workload.sampling(requests)
    with LLM(model.path, **engine.arguments(yaml_path)) as llm:
        warm_up(llm, requests, sampling, concurrency, warmup)
        before = llm.server_info()
        run = run_requests(llm, requests, sampling, concurrency, streaming)
        report = reports.build_report(
            model.name, llm.args, run, streaming, (before, llm.server_info())
        )
    click.echo(format_report(report))
    write_json(report_json, report)
    write_json(output_json, reports.output_records(run.outputs))
    write_json(request_json, reports.request_records(run.outputs))


@main.command(cls=ModelCommand)
@click.argument("configs", nargs=-1, required=True, type=EXISTING_FILE)
@bench_options.workload_options
@bench_options.max_batch_size_option
@bench_options.engine_options
@click.option(
    "--concurrency", type=CONCURRENCY, default=1, help="Requests under way at a time; -1 = all."
)
@click.option(
    "--repeat", type=POSITIVE, default=3, help="Runs of each configuration; medians are shown."
)
@click.option(
    "--warmup", type=NOT_NEGATIVE, default=1, help="Runs of each configuration that do not count."
)
@click.option(
    "--show_text", type=NOT_NEGATIVE, default=0, help="How many of the generated texts to print."
)
@click.option("--allow_differences", is_flag=True, help="Exit with 0 although texts differ.")
@bench_options.report_json_option
@click.pass_obj
def compare(
    model: Model,
    /,
    configs: tuple[Path, ...],
    concurrency: int,
    repeat: int,
    warmup: int,
    show_text: int,
    allow_differences: bool,
    report_json: Path | None,
    **options: Any,
) -> None:
    """Run the same requests through several YAML files of LLM arguments, the first being the
    baseline.

    All engines are in memory together and run in turn. A prompt's pages stay in the cache from run
    to run
    unless a file says `enable_block_reuse: false`, so that mostly decoding is compared. Exits with
    1 when a text is not the baseline's."""
    from tllm_spec.bench.compare import Contestant, comparison, differences, run_in_turn
    from tllm_spec.bench.options import split_options
    from tllm_spec.bench.table import format_comparison, format_texts
    from tllm_spec.llm import LLM

    workload, engine = split_options(options)
    engine = engine.sharing_memory(len(configs))
    requests = workload.requests()
    sampling = workload.sampling(requests)
    with ExitStack() as stack:
        contestants = []
        for path in configs:
            llm = stack.enter_context(LLM(model.path, **engine.arguments(path)))
            contestants.append(Contestant(path.stem, llm))
        run_in_turn(contestants, requests, sampling, repeat, warmup, concurrency)
        texts = format_texts(
            contestants[0].runs[0].outputs[:show_text], contestants[0].llm.tokenizer
        )
    rows, found = comparison(contestants), differences(contestants, requests)
    click.echo("\n".join([*texts, format_comparison(rows), *map(str, found)]))
    write_json(report_json, {"configurations": rows, "differences": [vars(each) for each in found]})
    if found and not allow_differences:
        raise SystemExit(1)
    if not found:
        click.echo(
            f"All {len(configs)} configurations gave the same {len(requests)} texts in every run."
        )


if __name__ == "__main__":
    main()
