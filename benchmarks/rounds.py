"""What a decoding round costs by how it is run. Every engine of a table takes turns with the one
that it is compared with.

    python -m benchmarks.rounds [zero_drafts] [sampling_params] [deterministic] [trees]

zero_drafts      an engine with a drafter at draft length 0, over one without speculation
sampling_params  one request with parameters that the round's graph does not cover, over greedy
deterministic    `deterministic: true` over the default
trees            draft trees over chains of the same depth, one-model EAGLE-3 with 5 steps of 8
                 beams: milliseconds, tokens per second, and the acceptances of the best child with
                 which the tree has more of them. Tokens are those expected at a scripted acceptance
                 by rank: the trees of random weights mean nothing. Goals: 1.25 of the chain's round
                 at batch 1 with 32 rows, 1.7 at batch 8

Random prompts; with `--shape llama-8b` random weights and synthetic acceptance."""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness.engine import Rounds, in_turns, release
from benchmarks.harness.forced_rounds import Profile, by_rank
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, crossed, main, number, table
from tllm_spec.config.draft_shape import DraftShape, chain_of

K = 3
PARAMS: Mapping[str, dict[str, Any]] = {
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},  # the round's graph covers these
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "logit_bias": {"logit_bias": {7: 2.0}},
}
NEVER = {"draft_len_schedule": {1: 0}}
STEPS, TOPK = 5, 8  # of trees
WINDOWS = (8, 16, 32, 64)  # rows: the root and the drafts
GOALS = {(32, 1): 1.25, (32, 8): 1.7}  # of the chain's round, by rows and batch size
FIRST_RANK = 0.7  # acceptance of the best child in the table


class Case:
    """Sizes of a run, and engines that fit them. `turns`: those that count."""

    def __init__(self, options: Options, models: Models) -> None:
        self.models, self.is_8b = models, models.is_8b
        self.batch_sizes = (1, 8, 64) if self.is_8b else (1, 2)
        self.prompt_len = 1024 if self.is_8b else 48
        self.rounds, self.turns = (64, 3) if self.is_8b else (4, 2)
        self.is_quick = options.quick
        if options.quick:
            self.batch_sizes, self.turns = self.batch_sizes[:1], 1
            self.rounds = min(20, self.rounds)

    def engine(self, *batch_sizes: int, **options: Any) -> Rounds:
        """Filled with requests, and with room for all turns. Bounded, because several engines are
        alive at a time."""
        speculates, largest = bool(options.get("speculative_config")), max(batch_sizes)
        room = (40 + (self.turns + 2) * self.rounds) * (1 + K * speculates)
        tokens = (largest + 1) * (self.prompt_len + room + 200)
        own = {
            "kv_cache_config": {"enable_block_reuse": False, "max_tokens": tokens},
            "cuda_graph_config": {"batch_sizes": batch_sizes},
        }
        engine = Rounds(
            self.models.target,
            max_batch_size=largest,
            max_seq_len=self.prompt_len + room,
            **(self.models.options | own | options),
        )
        engine.start(batch_sizes[0], self.prompt_len)
        return engine

    def compare(self, engines: Mapping[str, Rounds]) -> dict[str, float]:
        """Median milliseconds of a round."""
        sides = {name: partial(each.round_ms, self.rounds) for name, each in engines.items()}
        return {name: statistics.median(v) for name, v in in_turns(sides, self.turns).items()}

    def restarted_ms(self, engine: Rounds, params: dict[str, Any]) -> float:
        engine.start(len(engine.requests), self.prompt_len, **params)
        return engine.round_ms(self.rounds)


def cases(measure: Callable[[Case], Iterator[Row]]) -> Callable[[Options], Iterator[Row]]:
    def run(options: Options) -> Iterator[Row]:
        with open_models(options.shape, options.device) as models:
            for row in measure(Case(options, models)):
                yield row
                release()

    return run


def zero_drafts(case: Case) -> Iterator[Row]:
    models = case.models
    configs = {
        "EAGLE-3": models.eagle3(K, **NEVER),
        "EAGLE-3 two-model": models.eagle3(K, eagle3_one_model=False, **NEVER),
        "Draft/Target one-model": models.draft_target(K, draft_target_one_model=True, **NEVER),
        "Draft/Target": models.draft_target(K, **NEVER),
        "NGram": {"decoding_type": "NGram", "max_draft_len": K, **NEVER},
    }
    for batch_size in case.batch_sizes:
        for drafter, config in configs.items():
            drafting = case.engine(batch_size, speculative_config=config)
            plain = case.engine(batch_size, weights_of=drafting)
            found = case.compare({"plain": plain, "zero": drafting})
            ratio = found["zero"] / found["plain"]
            yield {"path": drafter, "batch_size": batch_size, "ms": found["plain"], "ratio": ratio}
            del drafting, plain
            release()


def sampling_params(case: Case) -> Iterator[Row]:
    """The same engine with new requests, the last of which has the parameters or not."""
    for batch_size in sorted({case.batch_sizes[0], case.batch_sizes[-1]}):
        for path, config in (("plain", None), ("EAGLE-3", case.models.eagle3(K))):
            engine = case.engine(batch_size, speculative_config=config)
            for name, params in PARAMS.items():
                sides = {
                    "greedy": partial(case.restarted_ms, engine, {}),
                    "with": partial(case.restarted_ms, engine, params),
                }
                found = in_turns(sides, case.turns)
                pairs = zip(found["with"], found["greedy"], strict=True)
                yield {
                    "path": path,
                    "batch_size": batch_size,
                    "params": name,
                    "ms": statistics.median(found["greedy"]),
                    "ratio": statistics.median(own / greedy for own, greedy in pairs),
                }
            del engine


def deterministic(case: Case) -> Iterator[Row]:
    for path, config in (("plain", None), ("EAGLE-3", case.models.eagle3(K))):
        for batch_size in case.batch_sizes:
            engines = {
                name: case.engine(batch_size, speculative_config=config, deterministic=name == "on")
                for name in ("off", "on")
            }
            found = case.compare(engines)
            ratio = found["on"] / found["off"]
            yield {"path": path, "batch_size": batch_size, "ms": found["off"], "ratio": ratio}
            del engines
            release()


def trees(case: Case) -> Iterator[Row]:
    sizes = ((1, 8) if case.is_quick else (1, 4, 8, 16, 32)) if case.is_8b else (1,)
    case.rounds = min(case.rounds, 20)

    def engine(rates: float | tuple[float, ...], **options: Any) -> Rounds:
        synthetic = {"synthetic_acceptance_rates": [rates] * STEPS}
        config = case.models.eagle3(STEPS, **synthetic, **options.pop("tree", {}))
        return case.engine(*sizes, speculative_config=config, **options)

    chain = engine(0.5)
    for num_rows in WINDOWS if case.is_8b and not case.is_quick else WINDOWS[1:3]:
        shape = {"dynamic_tree_max_topK": TOPK, "max_total_draft_tokens": num_rows - 1}
        tree = engine(by_rank(0.5, TOPK), tree={"use_dynamic_tree": True} | shape, weights_of=chain)
        for batch_size in sizes:
            for each in (chain, tree):
                each.start(batch_size, case.prompt_len)
            found = case.compare({"chain_ms": chain, "tree_ms": tree})
            yield {"rows": num_rows, "batch_size": batch_size} | found
        del tree
        release()


def tree_of(num_rows: int) -> DraftShape:
    return DraftShape(STEPS, num_rows - 1, TOPK)


def winning(num_rows: int, time_ratio: float) -> list[float]:
    """Acceptances of the best child, in hundredths, with which the tree has more tokens per second
    than the chain."""
    profiles = [Profile(first / 100) for first in range(1, 100)]
    tree, chain = tree_of(num_rows), chain_of(STEPS)
    return [p.first for p in profiles if p.expected(tree) / p.expected(chain) > time_ratio]


def trees_table(rows: Sequence[Row]) -> list[str]:
    lines, profile = [], Profile(FIRST_RANK)
    for row in rows:
        num_rows, batch_size, chain_ms, tree_ms = (
            row[key] for key in ("rows", "batch_size", "chain_ms", "tree_ms")
        )
        ratio, goal = tree_ms / chain_ms, GOALS.get((num_rows, batch_size))
        shown = f" (goal {goal}{', missed' * (ratio > goal)})" if goal else ""
        wins = winning(num_rows, ratio)
        tokens = (1e3 * batch_size * profile.expected(chain_of(STEPS)) / chain_ms,
                  1e3 * batch_size * profile.expected(tree_of(num_rows)) / tree_ms)  # fmt: skip
        lines.append(
            [
                *(str(num_rows), str(batch_size), number(chain_ms), number(tree_ms)),
                *(f"{ratio:.3f}{shown}", *map(number, tokens)),
                f"{min(wins)} to {max(wins)}" if wins else "never",
            ]
        )
    titles = (
        "rows", "batch", "chain ms", "tree ms", "tree / chain",
        f"chain tok/s at {FIRST_RANK}", f"tree tok/s at {FIRST_RANK}", "tree wins at acceptance",
    )  # fmt: skip
    return table(titles, lines)


def ratios(name: str) -> Callable[[Sequence[Row]], list[str]]:
    """One line per value of `name`, one column per batch size, and per path if that is not it."""

    def column(row: Row) -> str:
        path = "" if name == "path" else f"{row['path']}, "
        return f"{path}batch {row['batch_size']}"

    return lambda rows: crossed("", [(r[name], column(r), f"{r['ratio']:.3f}") for r in rows])


ZERO, PARAMS_TITLE = "Draft length 0 over plain decoding", "Sampling parameters over greedy"
ON = "`deterministic: true` over default"
SUBJECTS = (
    Subject("zero_drafts", ZERO, cases(zero_drafts), ratios("path")),
    Subject("sampling_params", PARAMS_TITLE, cases(sampling_params), ratios("params")),
    Subject("deterministic", ON, cases(deterministic), ratios("path"), needs_cuda=True),
    Subject("trees", "Rounds of draft trees", cases(trees), trees_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
