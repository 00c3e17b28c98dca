"""`tllm-bench adaptive-replay`: the draft lengths that the adaptive policy chooses for recorded
decode rounds. No model is loaded."""

import json
from pathlib import Path

import click

from tllm_spec.cli.bench_options import EXISTING_FILE, NOT_NEGATIVE


def sizes(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of batch sizes such as 1,2,4,8")
    return [int(part) for part in parts]


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
    callback=sizes,
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
