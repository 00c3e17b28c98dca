"""Everything that the engine is held to on one H200, in one run: each figure beside its bar, peer
and floor.

    python benchmarks/h200.py [--parts 1,2,3,4,5,6] [--quick] [--output result.json] python
    benchmarks/h200.py --shape zoo --device cpu     # shows that it runs, in a minute; its figures
    mean nothing

An 8B Llama's shape in bf16 with random weights, prompts of random ids, greedy, and synthetic
acceptance (0.73 / 0.52 / 0.35 by position: 2.60 tokens a round, the peers'). The floor is what has
to be read at 4.45 TB/s, or computed at 790 TFLOP/s. Each job has a process of its own; one that
fails is reported, and the others go on."""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h200_llm
import h200_rounds
import h200_startup
import torch
from h200_figures import POINTS, REFERENCES, Figure, Reference, missing, table
from h200_setup import SCALES, Report, Setup
from model_shapes import write_configs

from tllm_spec.bench.report import machine_section


@dataclass(frozen=True)
class Job:
    """`points`: what it can measure; it runs when one of them is asked for."""

    name: str
    points: frozenset[int]
    run: Callable[[Setup, Report], None]


@dataclass
class Outcome:
    """What a run found. `failures`: why a job did not come to its end, by name."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


JOBS = (
    Job("plain rounds", frozenset({1, 4, 5}), h200_rounds.plain_rounds),
    Job("EAGLE-3 rounds", frozenset({2, 4, 5}), h200_rounds.eagle3_rounds),
    Job("prefill", frozenset({3}), h200_rounds.prefill),
    Job("plain through LLM", frozenset({2, 3, 5}), h200_llm.plain),
    Job("EAGLE-3 through LLM", frozenset({2, 3, 5}), h200_llm.eagle3),
    Job("other rounds", frozenset({2}), h200_rounds.other_rounds),
    Job("chunked prefill", frozenset({5}), h200_llm.chunked),
    Job("start-up", frozenset({6}), h200_startup.start_up),
    Job("weights from files", frozenset({6}), h200_startup.from_files),
)
JOB_LIMIT_S = 120.0
RUN_LIMIT_S = 600.0


def in_a_process(job: Job, setup: Setup, time_limit_s: float, outcome: Outcome) -> None:
    """Runs a job in a fork, which has everything imported; this process never touches the
    device."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_job_main, args=(job, setup, sender))
    start = time.perf_counter()
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, start + time_limit_s - time.perf_counter())):
            message = receiver.recv()
            if isinstance(message, Figure):
                outcome.figures.append(message)
            else:
                outcome.machine = message
        outcome.failures[job.name] = f"not done after {time_limit_s:.0f} s"
        process.terminate()
        process.join()
    except EOFError:  # it has closed its end: done or dead
        process.join()
        if process.exitcode:
            outcome.failures[job.name] = (
                f"ended with exit code {process.exitcode}; see its messages"
            )
    outcome.seconds[job.name] = time.perf_counter() - start


def _job_main(job: Job, setup: Setup, sender: Connection) -> None:
    if setup.device == "cpu":
        torch.set_num_threads(1)  # the parent's threads do not live in a fork
    job.run(setup, partial(_send, sender))
    sender.send(machine_section(setup.device))


def _send(sender: Connection, figure: Figure) -> None:
    print(
        f"{figure.point} | {figure.name} | {figure.value:.2f} {figure.unit}",
        file=sys.stderr,
        flush=True,
    )
    sender.send(figure)


def run_jobs(setup: Setup, jobs: tuple[Job, ...], time_limit_s: float) -> Outcome:
    outcome, end = Outcome(), time.perf_counter() + time_limit_s
    for job in jobs:
        if job.points & setup.points:
            left = end - time.perf_counter()
            if left <= 0:
                outcome.failures[job.name] = f"not begun: {time_limit_s:.0f} s were over"
                continue
            in_a_process(job, setup, min(left, JOB_LIMIT_S), outcome)
            print(f"-- {job.name}: {outcome.seconds[job.name]:.0f} s", file=sys.stderr, flush=True)
    return outcome


def tables(
    outcome: Outcome, points: frozenset[int], references: Mapping[tuple[int, str], Reference]
) -> list[str]:
    lines = []
    for point in sorted(points):
        lines += [*table(point, outcome.figures, references), ""]
    lines += [f"**{name}**: {why}" for name, why in outcome.failures.items()]
    return lines


def parts(text: str) -> frozenset[int]:
    chosen = frozenset(map(int, text.split(",")))
    if not chosen <= POINTS.keys():
        raise argparse.ArgumentTypeError(f"{text!r}: parts are {', '.join(map(str, POINTS))}")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=parts, default=frozenset(POINTS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests")
    parser.add_argument("--shape", choices=tuple(SCALES), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--time-limit", type=float, default=RUN_LIMIT_S, help="seconds the run may take"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    references = REFERENCES if args.shape == "llama-8b" else {}
    with tempfile.TemporaryDirectory() as name:
        write_configs(Path(name))
        setup = Setup(args.shape, args.device, args.quick, args.parts, Path(name))
        outcome = run_jobs(setup, JOBS, args.time_limit)
    print("\n".join(tables(outcome, args.parts, references)))
    if args.output is not None:
        result = {
            "shape": args.shape,
            "quick": args.quick,
            "torch": torch.__version__,
            **asdict(outcome),
        }
        args.output.write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return 1 if outcome.failures or missing(outcome.figures, references, args.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
