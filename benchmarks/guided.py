"""What guided decoding costs in a round: batches in which no request, half of them, or all have a
grammar, with overlap.

    python -m benchmarks.guided [rounds]

rounds  milliseconds of a round, and its ratio over batches without a grammar of the same engine

Random prompts; with `--shape llama-8b` random weights. Drafts are verified without synthetic
acceptance, which would accept what a grammar excludes. The grammar is of JSON lines that never end;
the texts of all requests differ. The kinds of batches take turns."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.grammars import JsonLines
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, table

K = 3
KINDS = {"none": 0.0, "half": 0.5, "all": 1.0}


def rounds(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        is_8b = models.is_8b
        sizes = ((1, 8) if options.quick else (1, 8, 64)) if is_8b else (1, 2)
        number, turns = (48, 3) if is_8b else (8, 1)
        lines: JsonLines | None = None
        target: Rounds | None = None
        configs = {"plain": None, "EAGLE-3": models.eagle3(K, synthetic_acceptance_rates=None)}
        for drafter, config in configs.items():
            engine = _engine(models, sizes, number, config, target)
            lines = lines or JsonLines(engine.built.model_config.vocab_size)
            for size in sizes:
                yield from _of_batches(engine, lines, size, number, turns, {"path": drafter})
            engine.stop()
            target = engine


def _engine(
    models: Models,
    sizes: Sequence[int],
    number: int,
    config: dict[str, Any] | None,
    weights_of: Rounds | None,
) -> Rounds:
    prompt_len = 256 if models.is_8b else 32
    max_seq_len = prompt_len + (1 + K) * (number + 40)
    kv_cache = {"enable_block_reuse": False, "max_tokens": (sizes[-1] + 1) * (max_seq_len + 100)}
    return Rounds(
        models.target,
        max_batch_size=sizes[-1],
        max_seq_len=max_seq_len,
        weights_of=weights_of,
        speculative_config=config,
        **models.options
        | {"kv_cache_config": kv_cache, "cuda_graph_config": {"batch_sizes": list(sizes)}},
    )


def _of_batches(
    engine: Rounds, lines: JsonLines, size: int, number: int, turns: int, about: Row
) -> Iterator[Row]:
    kinds = {name: part for name, part in KINDS.items() if size > 1 or part != 0.5}
    sides = {
        name: partial(_restarted_ms, engine, lines, size, round(size * part), number)
        for name, part in kinds.items()
    }
    found = in_turns(sides, turns)
    for name, values in found.items():
        pairs = zip(values, found["none"], strict=True)
        ratio = statistics.median(own / free for own, free in pairs)
        yield about | {
            "batch_size": size,
            "guided": name,
            "ms": statistics.median(values),
            "ratio": ratio,
        }
    release()


def _restarted_ms(
    engine: Rounds, lines: JsonLines, size: int, num_guided: int, number: int
) -> float:
    prompt_len = engine.built.max_seq_len - (1 + K) * (number + 40)
    engine.start(size, prompt_len, lines.states(num_guided))
    return engine.round_ms(number)


def ratios(rows: Sequence[Row]) -> list[str]:
    cells: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    for row in rows:
        text = f"{row['ms']:.3f} ({row['ratio']:.3f})"
        cells[row["path"], row["batch_size"]][row["guided"]] = text
    lines = [
        (path, str(size), *(own.get(kind, "–") for kind in KINDS))
        for (path, size), own in cells.items()
    ]
    return table(("", "batch", *KINDS), lines)


SUBJECTS = (Subject("rounds", "Guided rounds, ms (over none)", rounds, ratios),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
