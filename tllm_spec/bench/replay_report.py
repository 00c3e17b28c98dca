"""What `tllm-bench replay` prints: each configuration's acceptance on recorded traffic, after what
was served."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from tllm_spec.config.llm_args import LlmArgs, overlay, read_options
from tllm_spec.config.speculative_config import speculative_config_from
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import files_of, read_records, read_traffic, states_files
from tllm_spec.recording.traffic_record import TrafficHeader, TrafficRecord

# Options of the recorded engine that a configuration has, too, unless it says otherwise.
KEPT = (
    "tokenizer",
    "skip_tokenizer_init",
    "dtype",
    "load_format",
    "deterministic",
    "max_seq_len",
    "max_num_tokens",
)


def replay_report(
    folder: Path, model: str | None, configs: Sequence[Path], num_requests: int = 0
) -> list[dict[str, Any]]:
    """A row for what was served, then one for each configuration. model: None: the recorded one.
    num_requests: the latest ones; 0: all. Raises ValueError for what cannot be replayed."""
    records, served_model, options = read_served(folder, num_requests)
    states, own = states_of(folder, model, served_model), options.get("speculative_config")
    arguments = [arguments_of(model or served_model, options, path) for path in configs]
    served = sum((record.stats for record in records), SpeculativeStats())
    rows = [row_of("served", served, len(records), [])]
    for path, args in zip(configs, arguments, strict=True):
        found = replay(records, args, states)
        row = row_of(path.stem, found.total, len(records), found.simulated)
        if own is not None and speculative_config_from(own) == args.speculative_config:
            row["other_rounds"] = share_of_other_rounds(records, found.requests)
        rows.append(row)
    return rows


def share_of_other_rounds(
    records: Sequence[TrafficRecord], replayed: Sequence[SpeculativeStats]
) -> float:
    """The share of the served rounds that accepted another number of drafts in the replay: the
    smallest one that a request's counts allow."""
    moved = 0
    for record, stats in zip(records, replayed, strict=True):
        pairs = zip_longest(_by_accepted(record.stats), _by_accepted(stats), fillvalue=0)
        gaps = [one - other for one, other in pairs]
        moved += max(sum(max(0, gap) for gap in gaps), sum(max(0, -gap) for gap in gaps))
    return moved / max(1, sum(record.num_rounds for record in records))


def _by_accepted(stats: SpeculativeStats) -> list[int]:
    """How many rounds accepted 0 drafts, 1 draft and so on."""
    at_least = [stats.rounds, *stats.per_position_accepted, 0]
    return [more - less for more, less in pairwise(at_least)]


def read_served(
    folder: Path, num_requests: int = 0
) -> tuple[list[TrafficRecord], str, dict[str, Any]]:
    """The latest requests in the order of their arrival, and the model and options that the latest
    file has. Raises ValueError for a folder without requests, or without these."""
    records = read_records(folder, num_requests or None)
    if not records:
        raise ValueError(f"{folder} has no recorded requests")
    for file in reversed(files_of(folder)):
        for each in read_traffic(file):
            if isinstance(each, TrafficHeader):
                return records, each.model, each.options
    raise ValueError(f"{folder}: no file begins with the model that was served")


def states_of(folder: Path, model: str | None, served_model: str) -> Mapping[str, Path]:
    """As `replay` takes them; of another model than the one that served there are none."""
    return states_files(folder) if model in (None, served_model) else {}


def arguments_of(model: str, served: dict[str, Any], path: Path) -> LlmArgs:
    """The arguments of a file for a model, with what else was served."""
    kept = {name: served[name] for name in KEPT if name in served}
    return LlmArgs.from_kwargs(model, **overlay(kept, read_options(path)))


def row_of(
    name: str, stats: SpeculativeStats, num_requests: int, simulated: Sequence[str]
) -> dict[str, Any]:
    return {
        "name": name,
        "requests": num_requests,
        "rounds": stats.rounds,
        "tokens_per_round": stats.acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_by_position": list(stats.per_position_acceptance),
        "simulated": list(simulated),
    }


def replay_table(rows: Sequence[dict[str, Any]]) -> str:
    """Plain text; under the table how far the replay of what served is from serving, and a cause
    for each row whose counts are simulated."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'':{width}}  requests  rounds  tokens/round  accepted  by position"]
    for row in rows:
        by_position = " ".join(f"{each:.2f}" for each in row["acceptance_by_position"])
        lines.append(
            f"{row['name']:{width}}  {row['requests']:8}  {row['rounds']:6}  "
            f"{row['tokens_per_round']:12.3f}  {row['draft_acceptance_rate']:8.3f}  {by_position}"
        )
    for row in rows:
        if "other_rounds" in row:
            lines.append(f"{row['name']} served: {row['other_rounds']:.2%} of its rounds differ")
        lines += [f"{row['name']} is simulated: {cause}" for cause in row["simulated"]]
    return "\n".join(lines)
