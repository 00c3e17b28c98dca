"""`tllm-bench break-even`: predicted and measured speedups of speculation, by acceptance rate and
draft length."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tllm_spec.config.draft_shape import DraftShape

from tllm_spec.cli.bench_options import (
    POSITIVE,
    Model,
    ModelCommand,
    report_json_option,
    write_json,
    yaml_option,
)

USUAL = "0.3:2,0.5:3,0.7:4,0.85:5"  # weak to strong drafters


def pairs_of(
    context: click.Context, option: click.Parameter, value: str
) -> list[tuple[float, int]]:
    try:
        parts = [part.split(":") for part in value.split(",")]
        pairs = [(float(acceptance), int(draft_len)) for acceptance, draft_len in parts]
    except ValueError:
        pairs = []
    if not pairs or not all(
        0 <= acceptance <= 1 and draft_len > 0 for acceptance, draft_len in pairs
    ):
        raise click.BadParameter(
            f"{value!r} is not a list of acceptance rates and draft lengths such as 0.3:2,0.7:4"
        )
    return pairs


def trees_of(
    context: click.Context, option: click.Parameter, value: str | None
) -> "list[DraftShape] | None":
    if value is None:
        return None
    from tllm_spec.bench.break_even import parse_tree

    try:
        return [parse_tree(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of trees such as 5x8/31,3x4/8: steps x children of a node / "
            "drafts"
        ) from None


@click.command(name="break-even", cls=ModelCommand)
@yaml_option
@click.option(
    "--pairs",
    callback=pairs_of,
    default=USUAL,
    help="Pairs of acceptance rate and draft length to measure, such as 0.3:2,0.7:4.",
)
@click.option(
    "--trees",
    callback=trees_of,
    help="Draft trees to measure instead, such as 5x8/31,3x4/8: steps x children / drafts.",
)
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    help="With --trees: requests as JSON lines, whose texts decide the acceptance.",
)
@click.option("--batch_size", type=POSITIVE, default=1, help="Number of requests in the batch.")
@click.option("--input_len", type=POSITIVE, default=16, help="Length of a prompt, in tokens.")
@click.option("--output_len", type=POSITIVE, default=64, help="Length of an output, in tokens.")
@click.option(
    "--repeat",
    type=POSITIVE,
    default=3,
    help="Measured runs of each engine after a warm-up; the table shows medians.",
)
@report_json_option
@click.pass_obj
def break_even(
    model: Model,
    /,
    yaml_path: Path | None,
    pairs: list[tuple[float, int]],
    trees: "list[DraftShape] | None",
    dataset: Path | None,
    report_json: Path | None,
    **workload: int,
) -> None:
    """Compare the predicted speedup of drafting with the measured one.

    The prediction: n = (1 - a^(K+1)) / (1 - a) tokens take the time of a round with K drafts,
    measured as `tune` does. The drafter is the YAML file's. In the measured runs each draft is
    accepted at random, with probability a when the one before was accepted, so the texts mean
    nothing. A drafter that finds its drafts in the text has none in some rounds: the prediction
    counts these as plain ones, and the table has the share of rounds that had drafts.

    With --trees acceptance by depth and rank is measured on the data set's first requests (without
    one, on random tokens, which say nothing about real texts), and the table shows the tokens a
    round that each shape has and those that it needs to be as fast as plain decoding."""
    from tllm_spec.bench.break_even import BreakEvenRuns, Workload
    from tllm_spec.bench.runner import EngineOptions
    from tllm_spec.bench.table import format_speedups
    from tllm_spec.llm import LLM
    from tllm_spec.progress import progress

    if trees is not None:
        _compare_trees(model, yaml_path, trees, dataset, report_json, workload)
        return
    options = EngineOptions(max_batch_size=workload["batch_size"]).sharing_memory(num_engines=3)
    requests = Workload(**workload)
    runs = BreakEvenRuns(LLM, model.path, options.arguments(yaml_path), requests)
    with progress(
        "break-even", len(pairs) * requests.num_requests, "requests", has_parts=True
    ) as bar:
        bar.begin("round times")
        shown, times = runs.round_seconds([draft_len for _, draft_len in pairs])
        with runs.plain() as plain:
            rows = [row.to_dict() for row in runs.speedups(plain, pairs, times, bar)]
    click.echo(format_speedups(shown, rows))
    write_json(report_json, {"round_seconds": shown, "speedups": rows})


def _compare_trees(
    model: Model,
    yaml_path: Path | None,
    trees: "list[DraftShape]",
    dataset: Path | None,
    report_json: Path | None,
    workload: dict[str, int],
) -> None:
    from tllm_spec.bench.break_even import Workload, measured_shapes, with_trees
    from tllm_spec.bench.dataset import read_dataset
    from tllm_spec.bench.runner import EngineOptions
    from tllm_spec.bench.table import format_shapes
    from tllm_spec.llm import LLM

    batch_size = workload["batch_size"]
    arguments = EngineOptions(max_batch_size=batch_size).arguments(yaml_path)
    if not (spec := arguments.get("speculative_config")):
        raise ValueError("speculative_config is missing: --trees needs the options of a drafter")
    arguments["speculative_config"] = with_trees(spec, trees)
    with LLM(model.path, **arguments) as llm:
        if dataset is not None:
            requests = read_dataset(dataset, batch_size)
        else:
            requests = Workload(**workload).requests(llm.model_config.vocab_size, seed=0)
        rows = [row.to_dict() for row in measured_shapes(llm, trees, requests)]
    click.echo(format_shapes(rows))
    write_json(report_json, {"shapes": rows})
