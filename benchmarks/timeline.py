"""The timeline of both speculative paths, from a profiler's trace of steady rounds.

    python -m benchmarks.timeline [--batch-size N] [--output timeline.json] [--figure timeline.svg]
    python -m benchmarks.timeline --device cpu    # the zoo: shows that it runs

EAGLE-3 on the one-model and the two-model path and two-model Draft/Target, with three drafts, on
an 8B Llama's shape with random weights and synthetic acceptance. The figure shows three rounds of
each: on the host schedule, launch and read, on the device the graphs and the time without work."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import Rounds, phases_noted, release
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, number, table
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


def run(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        found = list(timelines(models, options.more.batch_size))
    if options.more.figure:
        Path(options.more.figure).write_text(draw(found), encoding="utf-8")
    yield from map(asdict, found)


def lines(rows: Sequence[Row]) -> list[str]:
    cells = [[row["path"], number(row["round_us"] / 1e3), number(row["idle_us"])] for row in rows]
    return table(("", "round, ms", "device idle, µs"), cells)


SUBJECTS = (Subject("timeline", "Rounds of both speculative paths", run, lines),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__, batch_size=1, figure=None))
