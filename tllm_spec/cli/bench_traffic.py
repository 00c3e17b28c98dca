"""Commands of `tllm-bench` for recorded traffic (`record_traffic`)."""

import json
from pathlib import Path

import click

from tllm_spec.cli.bench_options import (
    DATASET,
    EXISTING_FILE,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    Model,
    count,
    plot_option,
    report_json_option,
    several,
    write_bytes,
    write_json,
    write_text,
)

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="erase-traffic")
@click.argument("folder", type=EXISTING_FOLDER)
@click.option(
    "--client",
    required=True,
    help="Name of the client's key, its address (in IPv6 a network), or its hash in the records.",
)
@click.option("--user", help="Only this user of the client (`user`, `safety_identifier`).")
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
@click.option(
    "--extra_llm_api_options",
    "--config",
    "configs",
    type=EXISTING_FILE,
    multiple=True,
    required=True,
    help="YAML file with arguments of LLM that have a speculative_config. May be given repeatedly.",
)
@click.option(
    "--num_requests", type=NOT_NEGATIVE, default=0, help="The latest requests to take; 0: all."
)
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
@click.option(
    "--extra_llm_api_options",
    "--config",
    "configs",
    type=EXISTING_FILE,
    multiple=True,
    help="YAML file with arguments of LLM: a drafter, whose draft length and shorter ones are "
    "compared. May be given repeatedly. [default: the drafter that served, and SA]",
)
@click.option(
    "--num_requests",
    type=NOT_NEGATIVE,
    default=0,
    help="The latest requests to take, of a data set the first ones; 0: all.",
)
@click.option(
    "--output", type=OUTPUT_FILE, help="YAML file to write the best configuration to, whole."
)
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
    click.echo(reports.tune_table(scores))
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
@click.option(
    "--config",
    type=EXISTING_FILE,
    required=True,
    help="YAML file with LLM arguments, or with the keys of `adaptive` alone.",
)
@click.option(
    "--round_times",
    type=EXISTING_FILE,
    help="JSON file with measured round times, for the cost model.",
)
@click.option(
    "--graph_batch_sizes",
    callback=several(count, "batch sizes such as 1,2,4,8"),
    help="Batch sizes that batches are padded to, such as 1,2,4,8.",
)
@click.option(
    "--initial_steps", type=NOT_NEGATIVE, help="Draft length of the first round, for strategy: ema."
)
@click.option(
    "--every_round", is_flag=True, help="Print every round, not only those that change it."
)
def adaptive_replay(
    trace: Path,
    config: Path,
    round_times: Path | None,
    graph_batch_sizes: list[int] | None,
    initial_steps: int | None,
    every_round: bool,
) -> None:
    """Print the draft lengths that would have been chosen for the rounds in TRACE.

    TRACE has one JSON object a line: batch_size, num_accepted (a list with a number for each
    request), and optionally num_steps (the draft length that was verified) and seconds (the
    round's time). Or it is a folder of recorded traffic (--record_traffic). When --config holds LLM
    arguments, their limits on the draft length apply as in an engine."""
    from tllm_spec.bench import adaptive_replay as replays
    from tllm_spec.bench.dataset import read_lines

    controller = replays.read_controller(
        config,
        graph_batch_sizes=graph_batch_sizes,
        initial_steps=initial_steps,
        round_times=replays.read_round_times(round_times) if round_times else None,
    )
    is_recorded = trace.is_dir()
    rounds = replays.recorded_trace(trace) if is_recorded else replays.read_trace(read_lines(trace))
    for each in replays.replay(controller, rounds):
        if every_round or each.changed:
            now = controller.tier_for(each.batch_size)
            click.echo(f"{each}{f' -> {now}' if each.changed else ''}")
    click.echo(json.dumps(controller.state(), indent=2))
