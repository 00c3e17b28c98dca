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
    several,
    write_json,
    yaml_option,
)

USUAL = "0.3:2,0.5:3,0.7:4,0.85:5"  # weak to strong drafters
TREES = "steps x children of a node / drafts"


def _pair(text: str) -> tuple[float, int]:
    first, second = text.split(":")
    acceptance, draft_len = float(first), int(second)
    if not 0 <= acceptance <= 1 or draft_len < 1:
        raise ValueError(text)
    return acceptance, draft_len


def _tree(text: str) -> "DraftShape":
    """`5x8/31`: 5 steps, 8 children of a node, 31 drafts."""
    from tllm_spec.config.draft_shape import DraftShape

    steps, _, rest = text.partition("x")
    topk, _, drafts = rest.partition("/")
    return DraftShape(int(steps), int(drafts), int(topk))


@click.command(name="break-even", cls=ModelCommand)
@yaml_option
@click.option(
    "--pairs",
    callback=several(_pair, "acceptance rates and draft lengths such as 0.3:2,0.7:4"),
    default=USUAL,
    help="Pairs of acceptance rate and draft length to measure, such as 0.3:2,0.7:4.",
)
@click.option(
    "--trees",
    callback=several(_tree, f"trees such as 5x8/31,3x4/8: {TREES}"),
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
    repeat: int,
    **sizes: int,
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
    from tllm_spec.bench import break_even as runs
    from tllm_spec.bench.dataset import read_dataset
    from tllm_spec.bench.runner import arguments_of
    from tllm_spec.bench.table import SHAPES, SPEEDUPS, format_rows
    from tllm_spec.llm import LLM

    batch_size = sizes["batch_size"]
    flags = {"max_batch_size": batch_size}
    if trees is None:
        arguments = arguments_of(flags, yaml_path, num_engines=3)
        times, rows = runs.break_even(model.path, arguments, pairs, repeat, **sizes)
        plain, free, drafted = (1e3 * times[name] for name in ("plain", "free", "drafted"))
        click.echo(
            f"round time: plain {plain:.2f} ms, verifying {times['draft_len']} drafts {free:.2f} "
            f"ms, drafting and verifying {times['draft_len']} {drafted:.2f} ms"
        )
        click.echo(format_rows(SPEEDUPS, rows))
        write_json(report_json, {"round_seconds": times, "speedups": rows})
        return
    arguments = arguments_of(flags, yaml_path)
    if not (spec := arguments.get("speculative_config")):
        raise ValueError("speculative_config is missing: --trees needs the options of a drafter")
    arguments["speculative_config"] = runs.with_trees(spec, trees)
    with LLM(model.path, **arguments) as llm:
        if dataset is not None:
            requests = read_dataset(dataset, batch_size)
        else:
            requests = runs.random_requests(llm.model_config.vocab_size, 0, **sizes)
        rows = runs.measured_shapes(llm, trees, requests)
    click.echo(format_rows(SHAPES, [row | {"rows": 1 + row["drafts"]} for row in rows]))
    write_json(report_json, {"shapes": rows})
