"""Draft trees against chains of the same depth, EAGLE-3 on the one-model path.

    python -m benchmarks.trees [rounds] [kernels] [acceptance] [--output trees.json]

rounds      milliseconds of a round, tokens per second and break-even acceptance, for windows of 8
            to 64 rows. Bars: 1.25 of the chain's round at batch 1 with 32 rows, 1.7 at batch 8
kernels     where a tree's round takes longer than the chain's: microseconds of each kernel
acceptance  tokens a round on held-out code, with the zoo's head

5 steps of 8 beams. Without CUDA, or with `--shape zoo`, the first two run on the zoo. With random
weights tokens are those expected at a scripted acceptance (`by_rank`): the draft network's own
trees would then be meaningless."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.draft_sampling import heldout_prompts
from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, number, table
from tllm_spec import LLM, SamplingParams
from tllm_spec.draft_shape import DraftShape, chain_of
from tllm_spec.executor.speculative.draft_length.expected_path import expected_accepted
from tllm_spec.outputs import SpeculativeStats

STEPS, TOPK = 5, 8
WINDOWS = (8, 16, 32, 64)  # rows: the root and the drafts
BARS = {(32, 1): 1.25, (32, 8): 1.7}  # of the chain's round, by rows and batch size
FIRST_RANK = 0.7  # acceptance of the best child in the table
# Of each further child, given that those before it were rejected.
NEXT_RANKS = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08)
MIN_LONGER = 1.1  # bar of tokens a round on the zoo, tree over chain


def by_rank(first: float) -> list[float]:
    """Scripted acceptance: the probability of each child of a node."""
    found, left = [first], 1 - first
    for share in NEXT_RANKS[: TOPK - 1]:
        found.append(left * share)
        left *= 1 - share
    return found


def tokens(shape: DraftShape, first: float) -> float:
    """Expected tokens of a request's round."""
    return 1 + expected_accepted(shape, [by_rank(first)] * STEPS)


def tree_of(num_rows: int) -> DraftShape:
    return DraftShape(STEPS, num_rows - 1, TOPK)


def winning(shape: DraftShape, time_ratio: float) -> list[float]:
    """Acceptances of the best child, in hundredths, with which the tree has more tokens per second
    than the chain."""
    found = [first / 100 for first in range(1, 100)]
    chain = chain_of(STEPS)
    return [p for p in found if tokens(shape, p) / tokens(chain, p) > time_ratio]


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
                "synthetic_acceptance_rates": [by_rank(0.5)] * STEPS,
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
        name: batch_size * tokens(of, FIRST_RANK) / found[name] * 1e3
        for name, of in (("chain", chain_of(STEPS)), ("tree", shape))
    }
    return {
        "rows": num_rows,
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
        bar = BARS.get((row["rows"], row["batch_size"]))
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


def acceptance(options: Options) -> Iterator[Row]:
    """The zoo's head on held-out code: a chain of 5 next to trees of 16 and 32 drafts."""
    prompts = heldout_prompts(1 if options.quick else 40)
    max_tokens = 8 if options.quick else 96
    for temperature in (None, 0.8):
        for num_drafts in (STEPS, 16, 32):
            stats = accepted(num_drafts, prompts, max_tokens, temperature)
            yield {"temperature": temperature, "drafts": num_drafts, **stats.to_dict()}


def accepted(
    num_drafts: int, prompts: list[list[int]], max_tokens: int, temperature: float | None
) -> SpeculativeStats:
    tree = {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": num_drafts,
    }
    config = {
        "decoding_type": "Eagle3",
        "speculative_model": "zoo:llama-eagle3",
        "max_draft_len": STEPS,
    } | (tree if num_drafts > STEPS else {})
    total = SpeculativeStats()
    with LLM("zoo:llama", speculative_config=config, max_batch_size=8, max_num_tokens=2048) as llm:
        handles = [
            llm.generate_async(
                prompt,
                SamplingParams(
                    seed=seed,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    ignore_eos=True,
                    detokenize=False,
                ),
            )
            for seed, prompt in enumerate(prompts)
        ]
        for handle in handles:
            total += handle.result().speculative_decoding or SpeculativeStats()
    return total


def acceptance_table(rows: Sequence[Row]) -> list[str]:
    chains = {row["temperature"]: row for row in rows if row["drafts"] == STEPS}
    lines = []
    for row in rows:
        length, chain = row["acceptance_length"], chains[row["temperature"]]["acceptance_length"]
        lines.append(
            [
                "greedy" if row["temperature"] is None else str(row["temperature"]),
                f"chain of {STEPS}" if row["drafts"] == STEPS else f"tree of {row['drafts']}",
                f"{length:.3f}",
                f"{length / chain:.3f}",
                " / ".join(f"{rate:.2f}" for rate in row["per_position_acceptance"]),
            ]
        )
    titles = ("temperature", "drafts", "tokens a round", f"over the chain (bar {MIN_LONGER})")
    return table((*titles, "accepted by depth"), lines)


SUBJECTS = (
    Subject("rounds", "Rounds of draft trees", rounds, rounds_table),
    Subject("kernels", "Kernels of a tree's round", kernels, kernels_table),
    Subject("acceptance", "Tokens a round of draft trees", acceptance, acceptance_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
