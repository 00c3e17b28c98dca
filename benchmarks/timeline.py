"""The timeline of both speculative paths, from a profiler's trace of steady rounds.

    python -m benchmarks.timeline [--batch-size N] [--output timeline.json] [--figure timeline.svg]
    python -m benchmarks.timeline --device cpu    # the zoo: shows that it runs

EAGLE-3 on the one-model and the two-model path and two-model Draft/Target, with three drafts, on
an 8B Llama's shape with random weights and synthetic acceptance. The figure shows three rounds of
each: on the host schedule, launch and read, on the device the graphs and the time without work."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.engine import Rounds, phases_noted, release
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import about, number, save, table
from benchmarks.harness.spans import Timeline, timeline
from benchmarks.harness.timeline_figure import draw

K = 3
NUM_ROUNDS, FIRST_DRAWN, NUM_DRAWN = 16, 6, 3


def paths(models: Models) -> Mapping[str, dict[str, Any]]:
    return {
        "EAGLE-3, one-model": models.eagle3(K),
        "EAGLE-3, two-model": models.eagle3(K, eagle3_one_model=False),
        "Draft/Target, two-model": models.draft_target(K),
    }


def timelines(models: Models, batch_size: int) -> Iterator[Timeline]:
    prompt_len = 1024 if models.is_8b else 16
    for path, config in paths(models).items():
        engine = Rounds(
            models.target,
            max_batch_size=batch_size,
            max_seq_len=prompt_len + 60 * (1 + K),
            speculative_config=config,
            **models.options,
        )
        engine.start(batch_size, prompt_len)
        with phases_noted(engine):
            events = engine.traced(NUM_ROUNDS)
        yield timeline(path, events, FIRST_DRAWN, NUM_DRAWN)
        del engine
        release()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--output", type=Path, help="figures and spans; others in it are kept")
    parser.add_argument("--figure", type=Path, help="the SVG")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with open_models("llama-8b" if device == "cuda" else "zoo", device) as models:
        found = list(timelines(models, args.batch_size))
    rows = [[each.path, number(each.round_us / 1e3), number(each.idle_us)] for each in found]
    print("\n".join(table((f"batch {args.batch_size}", "round, ms", "device idle, µs"), rows)))
    if args.output:
        result = {"about": about(device), "batch_size": args.batch_size}
        save(args.output, {"timeline": result | {"rows": [asdict(each) for each in found]}})
    if args.figure:
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_text(draw(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
