"""Draft trees against chains of the same depth, EAGLE-3 on the one-model path.

    python -m benchmarks.trees [rounds] [kernels] [--output trees.json]

rounds      milliseconds of a round, tokens per second and break-even acceptance, for windows of 8
            to 64 rows. Bars: 1.25 of the chain's round at batch 1 with 32 rows, 1.7 at batch 8
kernels     where a tree's round takes longer than the chain's: microseconds of each kernel

5 steps of 8 beams. Tokens are those expected at a scripted acceptance by rank (`by_rank`): the
trees of random weights mean nothing. Without CUDA, or with `--shape zoo`, both run on the zoo;
tree_acceptance.py measures its acceptance."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from benchmarks.harness.tree_simulator import by_rank, expected
from tllm_spec.config.draft_shape import DraftShape, chain_of

STEPS, TOPK = 5, 8
WINDOWS = (8, 16, 32, 64)  # rows: the root and the drafts
BARS = {(32, 1): 1.25, (32, 8): 1.7}  # of the chain's round, by rows and batch size
FIRST_RANK = 0.7  # acceptance of the best child in the table


def tree_of(num_rows: int) -> DraftShape:
    return DraftShape(STEPS, num_rows - 1, TOPK)


def winning(shape: DraftShape, time_ratio: float) -> list[float]:
    """Acceptances of the best child, in hundredths, with which the tree has more tokens per second
    than the chain."""
    found = [first / 100 for first in range(1, 100)]
    chain = chain_of(STEPS)
    return [p for p in found if expected(shape, p) / expected(chain, p) > time_ratio]


class Case:
    """Sizes of a run, and its engines. All share the first one's target weights."""

    def __init__(self, models: Models, *, quick: bool) -> None:
        self.models, is_8b = models, models.is_8b
        self.batch_sizes = (1, 4, 8, 16, 32) if is_8b else (1, 2)
        self.prompt_len, self.rounds, self.turns = (1024, 20, 3) if is_8b else (48, 3, 1)
        if quick:
            self.batch_sizes = (1, 8) if is_8b else (1,)
        self.chain = self._engine({"synthetic_acceptance_rates": [0.5] * STEPS})

    def tree(self, num_rows: int) -> Rounds:
        return self._engine(
            {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": TOPK,
                "max_total_draft_tokens": num_rows - 1,
                "synthetic_acceptance_rates": [by_rank(0.5, TOPK)] * STEPS,
            }
        )

    def start(self, engine: Rounds, batch_size: int) -> None:
        engine.start(batch_size, self.prompt_len)

    def _engine(self, speculation: dict[str, Any]) -> Rounds:
        largest = self.batch_sizes[-1]
        max_seq_len = self.prompt_len + 4 * (self.turns + 2) * self.rounds + 120
        # Bounded, because two engines are alive at a time.
        kv_cache = {
            "enable_block_reuse": False,
            "max_tokens": (largest + 1) * (max_seq_len + 200),
        }
        return Rounds(
            self.models.target,
            max_batch_size=largest,
            max_seq_len=max_seq_len,
            weights_of=getattr(self, "chain", None),
            speculative_config=self.models.eagle3(STEPS, **speculation),
            **self.models.options
            | {"kv_cache_config": kv_cache, "cuda_graph_config": {"batch_sizes": self.batch_sizes}},
        )


def rounds(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        case = Case(models, quick=options.quick)
        for num_rows in WINDOWS if models.is_8b and not options.quick else WINDOWS[1:3]:
            engine = case.tree(num_rows)
            for batch_size in case.batch_sizes:
                yield compared(case, engine, num_rows, batch_size)
            del engine
            release()
        del case
        release()


def compared(case: Case, engine: Rounds, num_rows: int, batch_size: int) -> Row:
    """Medians of turns."""
    sides = {"chain": case.chain, "tree": engine}
    for each in sides.values():
        case.start(each, batch_size)
    timed = {name: partial(each.round_ms, case.rounds) for name, each in sides.items()}
    found = {name: median(ms) for name, ms in in_turns(timed, case.turns).items()}
    shape, ratio = tree_of(num_rows), found["tree"] / found["chain"]
    wins = winning(shape, ratio)
    per_second = {
        name: batch_size * expected(of, FIRST_RANK) / found[name] * 1e3
        for name, of in (("chain", chain_of(STEPS)), ("tree", shape))
    }
    return {
        "rows": num_rows,
        "bar": BARS.get((num_rows, batch_size)) if case.models.is_8b else None,
        "batch_size": batch_size,
        **{f"{name}_ms": ms for name, ms in found.items()},
        "ratio": ratio,
        **{f"{name}_tokens_per_s": value for name, value in per_second.items()},
        "wins_from": min(wins, default=None),
        "wins_to": max(wins, default=None),
    }


def rounds_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        bar = row["bar"]
        missed = bar is not None and row["ratio"] > bar
        shown = f"{row['ratio']:.3f}" + (f" (bar {bar}{', missed' * missed})" if bar else "")
        wins = "never" if row["wins_to"] is None else f"{row['wins_from']} to {row['wins_to']}"
        per_second = [row["chain_tokens_per_s"], row["tree_tokens_per_s"]]
        lines.append(
            [
                *(str(row[key]) for key in ("rows", "batch_size")),
                *(number(row[key]) for key in ("chain_ms", "tree_ms")),
                shown,
                *map(number, per_second),
                wins,
            ]
        )
    titles = (
        "rows", "batch", "chain ms", "tree ms", "tree / chain",
        f"chain tok/s at {FIRST_RANK}", f"tree tok/s at {FIRST_RANK}", "tree wins at acceptance",
    )  # fmt: skip
    return table(titles, lines)


def kernels(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        case = Case(models, quick=True)
        engine = case.tree(32 if models.is_8b else 16)
        for batch_size in case.batch_sizes:
            found = {}
            for name, each in (("chain", case.chain), ("tree", engine)):
                case.start(each, batch_size)
                found[name] = kernel_us(each, 8)
            chain, tree = found["chain"], found["tree"]
            gained = {name: tree[name] - chain[name] for name in tree | chain}
            for name in sorted(gained, key=gained.__getitem__, reverse=True)[:20]:
                yield {
                    "batch_size": batch_size,
                    "kernel": name,
                    "chain_us": chain[name],
                    "tree_us": tree[name],
                }


def kernel_us(engine: Rounds, num_rounds: int) -> Counter[str]:
    """Microseconds of a round by kernel; on a CPU by operator, nested ones included."""
    spent: Counter[str] = Counter()
    events = engine.traced(num_rounds)
    kinds = {event.get("cat") for event in events}
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if "kernel" in kinds else ("cpu_op",)
    for event in events:
        if event.get("cat") in wanted:
            spent[event["name"][:70]] += event["dur"] / num_rounds
    return spent


def kernels_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            str(row["batch_size"]),
            f"`{row['kernel']}`",
            *(number(float(row[key])) for key in ("chain_us", "tree_us")),
            number(row["tree_us"] - row["chain_us"]),
        ]
        for row in rows
    ]
    return table(("batch", "kernel", "chain µs", "tree µs", "more µs"), lines)


SUBJECTS = (
    Subject("rounds", "Rounds of draft trees", rounds, rounds_table),
    Subject("kernels", "Kernels of a tree's round", kernels, kernels_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
