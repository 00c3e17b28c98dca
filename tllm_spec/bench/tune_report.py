"""`tllm-bench tune`: measures round times, scores candidates, and writes the best one as YAML."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tllm_spec.bench.dataset import read_dataset
from tllm_spec.bench.plot import LoadPoint
from tllm_spec.bench.report import format_rows
from tllm_spec.bench.runner import run_requests, sampling_for
from tllm_spec.bench.tune import (
    PLAIN,
    WITHOUT_LIMITS,
    Candidate,
    Score,
    Times,
    best_of,
    candidates_of,
    measured_prompt_seconds,
    score,
    trees_of,
)
from tllm_spec.config.config_base import ConfigModel
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.config.llm_args import LlmArgs, overlay, read_options
from tllm_spec.config.speculative_config import DecodingBaseConfig, speculative_config_from
from tllm_spec.executor.build import BuiltExecutor, build_executor
from tllm_spec.llm import LLM
from tllm_spec.models.automatic import with_drafter
from tllm_spec.outputs import SpeculativeStats
from tllm_spec.progress import progress
from tllm_spec.recording.replay import replay
from tllm_spec.recording.traffic_folder import files_of, read_records, read_traffic, states_files
from tllm_spec.recording.traffic_record import TrafficHeader, TrafficRecord
from tllm_spec.text.tokenizer import tokenizer_of

# What `tllm-bench replay` prints: each configuration's acceptance on recorded traffic, after what
# was served.


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
    with progress("configurations", len(configs)) as bar:
        for path, args in zip(configs, arguments, strict=True):
            bar.begin(path.stem)
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
    options = with_drafter(model, overlay(kept, read_options(path)))
    return LlmArgs.from_kwargs(model, **options)


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
    columns = [
        ("", "{name}"),
        ("requests", "{requests}"),
        ("rounds", "{rounds}"),
        ("tokens/round", "{tokens_per_round:.3f}"),
        ("accepted", "{draft_acceptance_rate:.3f}"),
        ("by position", "{acceptance_by_position}"),
    ]
    lines = [format_rows(columns, rows)]
    for row in rows:
        if "other_rounds" in row:
            lines.append(f"{row['name']} served: {row['other_rounds']:.2%} of its rounds differ")
        lines += [f"{row['name']} is simulated: {cause}" for cause in row["simulated"]]
    return "\n".join(lines)


NOT_WRITTEN = {  # of the best configuration: what it has from elsewhere, and what is recorded
    "model",
    "speculative_config",
    "record_traffic",
    "record_traffic_mib",
    "record_hidden_states",
}
MATCHES = {"decoding_type": "SA", "max_draft_len": 5}
MAX_SHARE = 0.98  # of the time for a token, to call another drafter better


def tune(
    data: Path, model: str | None, configs: Sequence[Path], num_requests: int = 0
) -> list[Score]:
    """Scores of plain decoding and of every candidate: of the files, or else of the drafter that
    served and of SA. data: recorded traffic, or a data set whose requests all arrive at once.
    Raises ValueError as `replay` does."""
    if data.is_dir():
        return _tune(data, model, configs, num_requests)
    if model is None:
        raise ValueError(f"{data} is a data set, whose outputs come from --model, which is missing")
    options = read_options(configs[0]) if configs else {}
    with TemporaryDirectory() as folder:
        # Served without drafts, with the first file's other options.
        options |= {"speculative_config": None, "record_traffic": folder}
        requests = read_dataset(data, num_requests)
        with LLM(model, **options) as llm, progress("outputs", len(requests), "requests") as bar:
            run_requests(llm, requests, sampling_for(requests), bar=bar)
        return _tune(Path(folder), model, configs)


def _tune(
    folder: Path, model: str | None, configs: Sequence[Path], num_requests: int = 0
) -> list[Score]:
    records, served_model, options = read_served(folder, num_requests)
    target, states = model or served_model, states_of(folder, model, served_model)
    drafters = [(path.stem, arguments_of(target, options, path)) for path in configs]
    if not drafters:
        own = options.get("speculative_config")
        specs = {"served": own} if own else {}
        for name, spec in (specs | {"sa": MATCHES}).items():
            drafters.append(
                (name, LlmArgs(**options | {"model": target, "speculative_config": spec}))
            )
    candidates = [_candidates(name, args) for name, args in drafters]
    candidates[0].insert(0, replace(candidates[0][0], drafter=PLAIN, shape=PLAIN, spec=None))
    scores: list[Score] = []
    with progress("tune", len(drafters) + sum(map(len, candidates))) as bar:
        for (name, args), own in zip(drafters, candidates, strict=True):
            assert args.speculative_config is not None
            size = min(args.max_batch_size, args.max_num_tokens)
            bar.begin(f"round times of {name}")
            times = measured_times(args, args.speculative_config, records, size)
            for each in own:
                bar.begin(each.name)
                scores.append(score(each, records, args, times(each.shape), size, states))
    return scores


def _candidates(name: str, args: LlmArgs) -> list[Candidate]:
    if args.speculative_config is None:
        raise ValueError(f"{name}: speculative_config = None has no drafts to tune")
    options = _without_nulls(args.as_options(), args)
    options = {key: each for key, each in options.items() if key not in NOT_WRITTEN}
    return [replace(each, options=options) for each in candidates_of(name, args.speculative_config)]


def measured_times(
    args: LlmArgs, spec: DecodingBaseConfig, records: Sequence[TrafficRecord], max_batch_size: int
) -> Callable[[str], Times]:
    """Times of a drafter on this machine, by the name of the drafts' shape: of rounds, as an
    adaptive engine measures them at its start, and of recorded prompts."""
    shapes, trees = [each.shape for each in candidates_of("", spec)], trees_of(spec)
    lengths = [int(shape) for shape in shapes if shape.isdigit()] or [spec.max_draft_len]
    own = spec.as_options() | WITHOUT_LIMITS
    built = timed_executor(args, own | {"adaptive": adaptive_options(lengths, trees)})
    controller = built.executor.parts.controller

    prompts = {
        is_plain: measured_prompt_seconds(built, records, max_batch_size, with_drafts=not is_plain)
        for is_plain in (False, True)
    }

    def of_shape(name: str) -> Times:
        tier = "0" if name == PLAIN else name
        return Times(
            lambda batch_size: controller.round_seconds(batch_size)[tier], prompts[name == PLAIN]
        )

    return of_shape


def adaptive_options(draft_lens: Sequence[int], trees: Sequence[DraftShape] = ()) -> dict[str, Any]:
    """`adaptive` of an engine that measures the times of rounds with these drafts, and without."""
    candidates = [
        {
            "max_draft_len": tree.depth,
            "dynamic_tree_max_topK": tree.topk,
            "max_total_draft_tokens": tree.num_nodes,
        }
        for tree in trees
    ]
    options: dict[str, Any] = {"candidate_steps": sorted({0, *draft_lens})}
    return options | {"candidate_trees": candidates} if candidates else options


def timed_executor(args: LlmArgs, spec: Mapping[str, Any]) -> BuiltExecutor:
    """An engine in this thread that has measured its round times. spec: a drafter's options with
    `adaptive_options`, in place of those in `args`."""
    off = {"record_traffic": None, "record_hidden_states": 0.0}
    options = args.as_options() | {"speculative_config": spec} | off
    built = build_executor(LlmArgs(**options), tokenizer_of(args), lambda responses: None)
    built.executor.enter_thread()
    return built


def tune_table(scores: Sequence[Score]) -> str:
    """Plain text, the best first."""
    columns = [
        ("", "{name}"),
        ("ms/token", "{ms_per_token:.3f}"),
        ("tokens/s", "{output_tokens_per_s:.1f}"),
        ("latency s", "{latency_s:.3f}"),
        ("tokens/round", "{tokens_per_round:.3f}"),
        ("rounds", "{num_rounds}"),
        ("", "{note}"),
    ]
    rows = tune_report(sorted(scores, key=lambda each: each.ms_per_token))
    notes = [{"note": "simulated" if row["simulated"] else ""} for row in rows]
    return format_rows(columns, [row | note for row, note in zip(rows, notes, strict=True)])


def tune_report(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [asdict(each) | {"name": each.candidate.name} for each in scores]


def tune_curves(scores: Sequence[Score]) -> dict[str, list[LoadPoint]]:
    """A curve for each drafter, a point for each of its shapes."""
    curves: dict[str, list[LoadPoint]] = {}
    for each in scores:
        latencies = {"e2el_ms": 1e3 * each.latency_s, "tpot_ms": each.ms_per_token}
        point = LoadPoint(each.candidate.shape, each.output_tokens_per_s, latencies)
        curves.setdefault(each.candidate.drafter, []).append(point)
    return curves


def advice(scores: Sequence[Score]) -> str:
    """A sentence: whether another drafter would be better than the first, which is the one that
    served, or the first file's."""
    own = next(each.candidate.drafter for each in scores if each.candidate.spec is not None)
    best, first = best_of(scores), best_of([s for s in scores if s.candidate.drafter == own])
    name, share = first.candidate.name, best.ms_per_token / first.ms_per_token
    if share > MAX_SHARE or best.candidate.drafter == own:
        return f"For this traffic no other of these drafters is better than {own} ({name})."
    return (
        f"For this traffic another drafter would be better: {best.candidate.name} takes {share:.2f}"
        f" of the time that {name} takes for a token."
    )


def best_yaml(scores: Sequence[Score]) -> str:
    """The best candidate as options of `LLM`, with a comment that says why."""
    best = best_of(scores)
    why = [
        f"# {best.candidate.name}: {best.ms_per_token:.3f} ms a token with the recorded arrivals,",
        f"# {best.tokens_per_round:.2f} tokens a round, {best.output_tokens_per_s:.1f} tokens a "
        "second.",
    ]
    plain = next((each for each in scores if each.candidate.spec is None), None)
    if plain is not None and plain is not best:
        gain = plain.ms_per_token / best.ms_per_token
        why.append(f"# Plain decoding: {plain.ms_per_token:.3f} ms a token, {gain:.2f} times that.")
    why += [f"# Simulated: {cause}." for cause in best.simulated]
    spec, drafter = best.candidate.spec, None
    if spec is not None:
        drafter = _without_nulls(spec, drafter_of(spec))
    options = {**best.candidate.options, "speculative_config": drafter}
    return "\n".join(why) + "\n" + yaml.safe_dump(options, sort_keys=False)


def drafter_of(spec: Mapping[str, Any]) -> DecodingBaseConfig:
    """Raises ConfigError for a drafter's mistakes."""
    config = speculative_config_from(spec)
    assert isinstance(config, DecodingBaseConfig)
    return config


def _without_nulls(options: Mapping[str, Any], config: ConfigModel) -> dict[str, Any]:
    """Without those that are the default."""
    known = {key: field.default for key, field in type(config).model_fields.items()}
    return {key: each for key, each in options.items() if (each, known.get(key)) != (None, None)}
