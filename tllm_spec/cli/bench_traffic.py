"""Commands of `tllm-bench` that choose drafters and their lengths: those for recorded traffic
(`record_traffic`), and `break-even`."""

import json
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
    report_json_option,
    several,
    write_bytes,
    write_json,
    write_text,
    yaml_option,
)
from tllm_spec.cli.version import flag, option

if TYPE_CHECKING:
    from tllm_spec.config.draft_shape import DraftShape


@click.command(name="erase-traffic")
@click.argument("folder", type=EXISTING_FOLDER)
@option(
    "--client",
    str,
    "Name of the client's key, its address (in IPv6 a network), or its hash in the records.",
    required=True,
)
@option("--user", str, "Only this user of the client (`user`, `safety_identifier`).")
def erase_traffic(folder: Path, client: str, user: str | None) -> None:
    """Erase a client's records from FOLDER. Servers may be recording to it."""
    from tllm_spec.recording.traffic_folder import TrafficFolder
    from tllm_spec.server.guard import kept_name

    traffic = TrafficFolder(folder)
    names = client, f"key {client}"
    if user is None:
        clients = {client, *map(traffic.hash_of, names)}
        number = traffic.erase(lambda record: record.client in clients)
    else:
        users = {traffic.hashes_of((name, kept_name(user)))[1] for name in names}
        number = traffic.erase(lambda record: record.user in users)
    click.echo(f"{number} {'record' if number == 1 else 'records'} erased")


@click.command()
@click.argument("folder", type=EXISTING_FOLDER)
@option(
    "--extra_llm_api_options --config configs",
    EXISTING_FILE,
    "YAML file with arguments of LLM that have a speculative_config. May be given repeatedly.",
    multiple=True,
    required=True,
)
@option("--num_requests", NOT_NEGATIVE, "The latest requests to take; 0: all.", default=0)
@report_json_option
@click.pass_obj
def replay(
    model: Model | None,
    folder: Path,
    configs: tuple[Path, ...],
    num_requests: int,
    report_json: Path | None,
) -> None:
    """Count the drafts that recorded traffic would have had accepted with other configurations.

    FOLDER was recorded with --record_traffic. The model is --model or else the recorded one. The
    first row is what was served."""
    from tllm_spec.bench.tune_report import replay_report, replay_table

    report = replay_report(folder, None if model is None else model.path, configs, num_requests)
    click.echo(replay_table(report))
    write_json(report_json, report)


@click.command()
@click.argument("data", type=DATASET)
@option(
    "--extra_llm_api_options --config configs",
    EXISTING_FILE,
    "YAML file with arguments of LLM: a drafter, whose draft length and shorter ones are "
    "compared. May be given repeatedly. [default: the drafter that served, and SA]",
    multiple=True,
)
@option(
    "--num_requests",
    NOT_NEGATIVE,
    "The latest requests to take, of a data set the first ones; 0: all.",
    default=0,
)
@option("--output", OUTPUT_FILE, "YAML file to write the best configuration to, whole.")
@plot_option
@report_json_option
@click.pass_obj
def tune(
    model: Model | None,
    data: Path,
    configs: tuple[Path, ...],
    num_requests: int,
    output: Path | None,
    plot: Path | None,
    report_json: Path | None,
) -> None:
    """Choose the drafter and draft length that would have served recorded traffic best.

    DATA was recorded with --record_traffic, or is a data set, whose outputs --model writes first.
    Acceptance comes from a replay, round times are measured on this machine, and requests arrive
    as they were recorded, those of a data set all at once."""
    from tllm_spec.bench import plot as plots
    from tllm_spec.bench import tune_report as reports

    scores = reports.tune(data, None if model is None else model.path, configs, num_requests)
    click.echo(reports.tune_table(scores) + "\n\n" + reports.advice(scores))
    best = reports.best_yaml(scores)
    click.echo(best)
    if output is not None:
        write_text(output, best)
    if plot is not None:
        title = plots.title_of(data.name)
        figure = plots.draw(reports.tune_curves(scores), title, "draft length or tree")
        write_bytes(plot, plots.image(figure, plot.suffix))
    write_json(report_json, reports.tune_report(scores))


@click.command(name="adaptive-replay")
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@option(
    "--config",
    EXISTING_FILE,
    "YAML file with LLM arguments, or with the keys of `adaptive` alone.",
    required=True,
)
@option("--round_times", EXISTING_FILE, "JSON file with measured round times, for the cost model.")
@option(
    "--graph_batch_sizes",
    str,
    "Batch sizes that batches are padded to, such as 1,2,4,8.",
    callback=several(count, "batch sizes such as 1,2,4,8"),
)
@option("--initial_steps", NOT_NEGATIVE, "Draft length of the first round, for strategy: ema.")
@flag("--every_round", "Print every round, not only those that change it.")
def adaptive_replay(
    trace: Path, config: Path, round_times: Path | None, every_round: bool, **given: Any
) -> None:
    """Print the draft lengths that would have been chosen for the rounds in TRACE.

    TRACE has one JSON object a line: batch_size, num_accepted (a list with a number for each
    request), and optionally num_steps (the draft length that was verified) and seconds (the
    round's time). Or it is a folder of recorded traffic (--record_traffic). When --config holds LLM
    arguments, their limits on the draft length apply as in an engine."""
    from tllm_spec.bench import adaptive_replay as replays
    from tllm_spec.recording.traffic_folder import read_lines

    given["round_times"] = replays.read_round_times(round_times) if round_times else None
    controller = replays.read_controller(config, **given)
    is_recorded = trace.is_dir()
    rounds = replays.recorded_trace(trace) if is_recorded else replays.read_trace(read_lines(trace))
    for line in replays.replay(controller, rounds, every_round=every_round):
        click.echo(line)
    click.echo(json.dumps(controller.state(), indent=2))


# `tllm-bench break-even`: predicted and measured speedups of speculation, by acceptance rate and
# draft length.


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
@option(
    "--pairs",
    str,
    "Pairs of acceptance rate and draft length to measure, such as 0.3:2,0.7:4.",
    callback=several(_pair, "acceptance rates and draft lengths such as 0.3:2,0.7:4"),
    default=USUAL,
)
@option(
    "--trees",
    str,
    "Draft trees to measure instead, such as 5x8/31,3x4/8: steps x children / drafts.",
    callback=several(_tree, f"trees such as 5x8/31,3x4/8: {TREES}"),
)
@option(
    "--dataset",
    click.Path(path_type=Path),
    "With --trees: requests as JSON lines, whose texts decide the acceptance.",
)
@option("--batch_size", POSITIVE, "Number of requests in the batch.", default=1)
@option("--input_len", POSITIVE, "Length of a prompt, in tokens.", default=16)
@option("--output_len", POSITIVE, "Length of an output, in tokens.", default=64)
@option(
    "--repeat",
    POSITIVE,
    "Measured runs of each engine after a warm-up; the table shows medians.",
    default=3,
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
    from tllm_spec.bench.report import SHAPES, SPEEDUPS, format_rows
    from tllm_spec.bench.runner import arguments_of
    from tllm_spec.llm import LLM

    batch_size = sizes["batch_size"]
    flags = {"max_batch_size": batch_size}
    if trees is None:
        arguments = arguments_of(model.path, flags, yaml_path, num_engines=3)
        times, rows = runs.break_even(model.path, arguments, pairs, repeat, **sizes)
        plain, free, drafted = (1e3 * times[name] for name in ("plain", "free", "drafted"))
        click.echo(
            f"round time: plain {plain:.2f} ms, verifying {times['draft_len']} drafts {free:.2f} "
            f"ms, drafting and verifying {times['draft_len']} {drafted:.2f} ms"
        )
        click.echo(format_rows(SPEEDUPS, rows))
        write_json(report_json, {"round_seconds": times, "speedups": rows})
        return
    arguments = arguments_of(model.path, flags, yaml_path)
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
