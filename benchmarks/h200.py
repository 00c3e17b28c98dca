"""Everything that the engine is held to on one H200, in one run: each figure with its goal, the
better of two peers, and the floor.

    python -m benchmarks.h200 [--parts 1,2,3,4,5,6] [--quick] [--output result.json]
    python -m benchmarks.h200 --shape zoo --device cpu   # shows that it runs, in a minute

An 8B Llama's shape in bf16 with random weights, random prompts, greedy, and synthetic acceptance
(0.73 / 0.52 / 0.35 by position: 2.60 tokens per round). The floor is what has to be read at 4.45
TB/s, or computed at 790 TFLOP/s. Each job has its own process; when one fails, that is reported and
the others go on."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200_parts import figures, llm, rounds, start_up
from benchmarks.h200_parts.figures import POINTS, Figure, Key, Reference
from benchmarks.h200_parts.setup import SCALES, Report, Setup
from benchmarks.harness.models import open_models
from benchmarks.harness.report import about, save

JOB_LIMIT_S, RUN_LIMIT_S = 120.0, 600.0


@dataclass(frozen=True)
class Job:
    """`points`: what it can measure. It runs when one of them is asked for."""

    name: str
    points: frozenset[int]
    run: Callable[[Setup, Report], None]


@dataclass
class Outcome:
    """`failures`: by job, why it did not end. `about`: device and versions."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


JOBS = (
    Job("plain rounds", frozenset({1, 4, 5}), rounds.plain_rounds),
    Job("EAGLE-3 rounds", frozenset({2, 4, 5}), rounds.eagle3_rounds),
    Job("prefill", frozenset({3}), rounds.prefill),
    Job("plain through LLM", frozenset({2, 3, 5}), llm.plain),
    Job("EAGLE-3 through LLM", frozenset({2, 3, 5}), llm.eagle3),
    Job("other rounds", frozenset({2}), rounds.other_rounds),
    Job("EAGLE-3 two-model", frozenset({2, 4, 5}), rounds.eagle3_two_model),
    Job("Draft/Target two-model", frozenset({2, 4, 5}), rounds.draft_target_two_model),
    Job("NGram", frozenset({2, 4, 5}), rounds.ngram),
    Job("start-up", frozenset({6}), start_up.start_up),
)


def run_job(job: Job, setup: Setup, time_limit_s: float, outcome: Outcome) -> None:
    """Forks a process for the job. This process never touches the device."""
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
                outcome.about = message
        outcome.failures[job.name] = f"not done after {time_limit_s:.0f} s"
        process.terminate()
        process.join()
    except EOFError:  # the job has closed its end: it is done, or dead
        process.join()
        if process.exitcode:
            why = f"ended with exit code {process.exitcode}; see its messages"
            outcome.failures[job.name] = why
    outcome.seconds[job.name] = time.perf_counter() - start


def _job_main(job: Job, setup: Setup, sender: Connection) -> None:
    if setup.models.device == "cpu":
        torch.set_num_threads(1)  # the parent's threads do not exist in a fork
    job.run(setup, partial(_send, sender))
    sender.send(about(setup.models.device))


def _send(sender: Connection, figure: Figure) -> None:
    line = f"{figure.point} | {figure.name} | {figure.value:.2f} {figure.unit}"
    print(line, file=sys.stderr, flush=True)
    sender.send(figure)


def run_jobs(setup: Setup, jobs: tuple[Job, ...], time_limit_s: float) -> Outcome:
    outcome, end = Outcome(), time.perf_counter() + time_limit_s
    for job in jobs:
        if job.points & setup.points:
            left = end - time.perf_counter()
            if left <= 0:
                outcome.failures[job.name] = f"not begun: {time_limit_s:.0f} s were over"
                continue
            run_job(job, setup, min(left, JOB_LIMIT_S), outcome)
            print(f"-- {job.name}: {outcome.seconds[job.name]:.0f} s", file=sys.stderr, flush=True)
    return outcome


def tables(
    outcome: Outcome, points: frozenset[int], references: Mapping[Key, Reference]
) -> list[str]:
    found = (figures.point_table(each, outcome.figures, references) for each in sorted(points))
    return list(chain.from_iterable(found)) + [
        f"**{name}**: {why}" for name, why in outcome.failures.items()
    ]


def parts(text: str) -> frozenset[int]:
    chosen = frozenset(map(int, text.split(",")))
    if not chosen <= POINTS.keys():
        raise argparse.ArgumentTypeError(f"{text!r}: parts are {', '.join(map(str, POINTS))}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=parts, default=frozenset(POINTS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests")
    parser.add_argument("--shape", choices=tuple(SCALES), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--time-limit", type=float, default=RUN_LIMIT_S, help="seconds in all")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    references = figures.REFERENCES if args.shape == "llama-8b" else {}
    with open_models(args.shape, args.device) as models:
        outcome = run_jobs(Setup(models, args.quick, args.parts), JOBS, args.time_limit)
    print("\n".join(tables(outcome, args.parts, references)))
    if references and not figures.missing(outcome.figures, references, POINTS):
        both = figures.headline(outcome.figures), figures.summary(outcome.figures)
        print("\n".join(["", *both[0], "", *both[1]]))
    if args.output is not None:
        args.output.unlink(missing_ok=True)
        save(args.output, {"shape": args.shape, "quick": args.quick, **asdict(outcome)})
    return 1 if outcome.failures or figures.missing(outcome.figures, references, args.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
