"""What draft length 0 costs: rounds of an engine that is asked for no drafts, beside those of one
without speculation.

    python benchmarks/plain_rounds.py [--shape llama-8b|zoo] [--batch-sizes 1,8] [--drafters
    EAGLE-3,NGram]
                                      [--cycles 6] [--repeat 5] [--output result.json]

"kept" is the engine as it is served: what a draft network on the target's pages would read is put
off, by a head for 16 rounds, by a model until drafts are wanted again. "at once" reads it in every
round. NGram and a draft model in its own engine read nothing. "return" is what comes before the
first round with drafts: how long it takes to read what waits then, in brackets how many positions
of each request. All engines have the same weights in memory and take turns of so many cycles of 16
rounds; a figure is the median over the turns of (its round time / plain round time of the same
turn), in brackets the range: where neighbours come and go, many short turns say more than a few
long ones. On a CPU times are the process's own (one thread for the zoo), so that neighbours on the
machine count less. `llama-8b` (random weights) needs a CUDA device."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from driven_rounds import Rounds, release, synchronize
from model_shapes import write_configs

from tllm_spec.executor.speculative import modes
from tllm_spec.executor.speculative.drafting.draft_backlog import BACKLOG_LEN, DraftBacklog
from tllm_spec.executor.speculative.drafting.worker import DraftWorker

DRAFT_LEN = 3
NEVER = {"max_draft_len": DRAFT_LEN, "draft_len_schedule": {1: 0}}


@dataclass(frozen=True)
class Turns:
    """Of each engine: `repeat` that count, of `num_rounds` rounds, which are whole cycles."""

    num_rounds: int
    repeat: int


@dataclass
class Row:
    """Milliseconds a round, and ratios to plain decoding: median, lowest, highest."""

    drafter: str
    batch_size: int
    plain_ms: float
    kept: tuple[float, float, float]
    at_once: tuple[float, float, float] | None  # None: there is nothing to read
    waiting: int  # positions of a request behind the last round
    return_ms: float | None


def measure(drafter: str, model: str, batch_size: int, turns: Turns, **options: Any) -> Row:
    prompt_len = 1024 if "load_format" in options else 128
    max_seq_len = prompt_len + turns.num_rounds * (turns.repeat + 1) + 100
    speculation = options.pop("speculative_config")
    pages = {"max_tokens": (batch_size + 1) * (max_seq_len + 100)}
    options |= {"max_batch_size": batch_size, "max_seq_len": max_seq_len, "kv_cache_config": pages}
    kept = Rounds(model, **options, speculative_config=speculation)
    options["weights_of"] = kept
    engines = {"plain": Rounds(model, **options), "kept": kept}
    if backlog_of(kept):
        at_once = partial(DraftBacklog, length=1, most_waiting=1)
        with mock.patch.object(modes, "DraftBacklog", at_once):
            engines["at once"] = Rounds(model, **options, speculative_config=speculation)
        backlog = backlog_of(engines["at once"])
        assert backlog is not None and backlog.most_waiting == 1
    times: dict[str, list[float]] = {name: [] for name in engines}
    with torch.inference_mode():
        for engine in engines.values():
            engine.executor.enter_thread()
            engine.start(batch_size, prompt_len)
        for turn in range(turns.repeat + 1):
            for name, engine in engines.items():
                round_ms = timed(engine, turns.num_rounds)
                if turn:
                    times[name].append(round_ms)
        waiting, return_ms = kept.requests[0].draft_backlog, read_ms(kept)
    row = Row(
        drafter,
        batch_size,
        statistics.median(times["plain"]),
        ratios(times["kept"], times["plain"]),
        ratios(times["at once"], times["plain"]) if "at once" in times else None,
        waiting,
        return_ms,
    )
    print(table_line(row), flush=True)
    return row


def backlog_of(engine: Rounds) -> DraftBacklog | None:
    round_end = engine.executor.parts.runner.round_end
    return round_end._backlog if isinstance(round_end, DraftWorker) else None


def read_ms(engine: Rounds) -> float | None:
    """All requests catch up. None: there is nothing to catch up with."""
    backlog = backlog_of(engine)
    if backlog is None:
        return None
    synchronize()
    start = time.perf_counter()
    backlog.read(engine.requests)
    synchronize()
    return (time.perf_counter() - start) * 1e3


def timed(engine: Rounds, num_rounds: int) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    synchronize()
    start = clock()
    engine.run(num_rounds)
    synchronize()
    return (clock() - start) / num_rounds * 1e3


def ratios(times: list[float], plain: list[float]) -> tuple[float, float, float]:
    found = [own / other for own, other in zip(times, plain, strict=True)]
    return statistics.median(found), min(found), max(found)


def table_line(row: Row) -> str:
    kept, at_once = (
        f"{each[0]:.3f} ({each[1]:.3f}–{each[2]:.3f})" if each else "–"
        for each in (row.kept, row.at_once)
    )
    back = "–" if row.return_ms is None else f"{row.return_ms:.1f} ({row.waiting})"
    return (
        f"| {row.drafter} | {row.batch_size} | {row.plain_ms:.2f} | {kept} | {at_once} | {back} |"
    )


def drafters(shape: str, folder: Path) -> tuple[str, dict[str, dict[str, Any]], dict[str, Any]]:
    """The target, configurations by name, and what else `LlmArgs` needs for them."""
    head, draft = "zoo:llama-eagle3", "zoo:llama-draft"
    model, options = "zoo:llama", dict[str, Any]()
    if shape == "llama-8b":
        write_configs(folder)
        model, head, draft = (str(folder / name) for name in ("target", "eagle3", "draft"))
        options = {"load_format": "dummy"}
    shared = NEVER | options
    eagle3 = {"decoding_type": "Eagle3", "speculative_model": head, **shared}
    draft_target = {"decoding_type": "Draft_Target", "speculative_model": draft, **shared}
    configs = {
        "EAGLE-3": eagle3,
        "EAGLE-3 two-model": eagle3 | {"eagle3_one_model": False},
        "Draft/Target one-model": draft_target | {"draft_target_one_model": True},
        "Draft/Target": draft_target,
        "NGram": {"decoding_type": "NGram", **NEVER},
    }
    return model, configs, options


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=("llama-8b", "zoo"), default="llama-8b")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument(
        "--drafters", help="names of the table, with commas between; all where it is missing"
    )
    parser.add_argument("--cycles", type=int, default=6, help="of each turn")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each engine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.shape == "llama-8b" and not torch.cuda.is_available():
        sys.exit("--shape llama-8b needs a CUDA device")
    rows, turns = list[Row](), Turns(args.cycles * BACKLOG_LEN, args.repeat)
    titles = (
        "drafter",
        "batch",
        "plain round, ms",
        "kept / plain",
        "at once / plain",
        "return, ms",
    )
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    with tempfile.TemporaryDirectory() as name:
        model, configs, options = drafters(args.shape, Path(name))
        wanted = args.drafters.split(",") if args.drafters else list(configs)
        for batch_size in map(int, args.batch_sizes.split(",")):
            for drafter in wanted:
                own = options | {"speculative_config": configs[drafter]}
                rows.append(measure(drafter, model, batch_size, turns, **own))
                release()
    if args.output is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        result = {"device": device, "torch": torch.__version__, "shape": args.shape} | asdict(turns)
        args.output.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
