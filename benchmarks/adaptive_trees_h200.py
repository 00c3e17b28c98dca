"""Adaptive trees on one GPU, in one engine, against every static chain and tree.

    python -m benchmarks.adaptive_trees_h200 [--quick] [--output result.json]
    python -m benchmarks.adaptive_trees_h200 --device cpu --quick          # shows that it runs

8B shape, bf16, random weights, a one-model EAGLE-3 head with 5 steps of 8 beams and 31 drafts, and
the default `candidate_trees`. Cells are batch sizes x profiles of acceptance, which is scripted by
depth and rank (harness/forced_trees.py). A static shape is the same engine with the same graphs,
held to that shape. Times are measured; tokens are those expected from the drafts that each round
verified (`counted / expected`: those that came out over these).

Each cell begins with a controller that knows only the round times of start-up. Static shapes play
before and after it in mirrored order. Untimed rounds come first, because a busy GPU lowers its
clock. Bars: 0.98 of the best static shape, and more than the best chain where a tree is better than
it by more than 2%."""

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.harness.forced_rounds import Block
from benchmarks.harness.forced_trees import ForcedTreeRounds, Profile, scripted_candidates
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

STEPS, TOPK, NUM_NODES = 5, 8, 31
LADDER = (0, 1, 2, 3, 5)
PROFILES = (Profile(0.3), Profile(0.6), Profile(0.8, 0.9), Profile(0.9))
MIN_STEADY = 0.98


@dataclass(frozen=True)
class Sizes:
    """Numbers of rounds are per block; of a static shape there are two."""

    batch_sizes: tuple[int, ...] = (1, 8)
    profiles: tuple[Profile, ...] = PROFILES
    prompt_len: int = 512
    room: int = 5632  # tokens that a request may have after its prompt
    settling_rounds: int = 400  # before the adaptive block
    adaptive_rounds: int = 120
    static_rounds: int = 30
    untimed_rounds: int = 8  # before each static block


QUICK = Sizes(profiles=PROFILES[1:3], settling_rounds=240, adaptive_rounds=80)
ZOO = Sizes((1, 2), PROFILES[1:3], 32, 480, 8, 8, 2, 1)


class Cells:
    """The engine and its controllers."""

    def __init__(self, models: Models, script: torch.Tensor, sizes: Sizes) -> None:
        self._sizes = sizes
        largest, max_seq_len = max(sizes.batch_sizes), sizes.prompt_len + sizes.room
        speculation = models.eagle3(
            STEPS,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=TOPK,
            max_total_draft_tokens=NUM_NODES,
            synthetic_acceptance_rates=[Profile(0.5).rates(1, TOPK)[0]] * STEPS,
            adaptive={"candidate_steps": list(LADDER)},
        )
        kv_cache = {"enable_block_reuse": False, "max_tokens": largest * (max_seq_len + 256)}
        own = {
            "kv_cache_config": kv_cache,
            "cuda_graph_config": {"batch_sizes": list(sizes.batch_sizes)},
        }
        self._rounds = ForcedTreeRounds(
            models.target,
            script,
            max_batch_size=largest,
            max_seq_len=max_seq_len,
            speculative_config=speculation,
            **models.options | own,
        )
        self._shapes = self._rounds.shapes
        self._fresh = self._rounds.executor.parts.controller
        tiers = (*LADDER, *self._shapes.tree_tiers)
        self._static = {tier: AdaptiveController.fixed(tier) for tier in tiers}

    def run(self) -> Iterator[Row]:
        for batch_size, profile in product(self._sizes.batch_sizes, self._sizes.profiles):
            self._rounds.start(batch_size, self._sizes.prompt_len)
            self._rounds.set_profile(profile)
            yield self._cell(batch_size, profile)
        self._rounds.stop()

    def _cell(self, batch_size: int, profile: Profile) -> Row:
        rounds, sizes, adaptive = self._rounds, self._sizes, copy.deepcopy(self._fresh)
        settling = rounds.play(adaptive, rounds=sizes.settling_rounds)
        static, played = {tier: Block() for tier in self._static}, Block()
        # In the middle, contexts have their average length.
        for tier in (*static, None, *reversed(static)):
            if tier is None:
                played += rounds.play(adaptive, rounds=sizes.adaptive_rounds)
            else:
                rounds.play(self._static[tier], rounds=sizes.untimed_rounds)
                static[tier] += rounds.play(self._static[tier], rounds=sizes.static_rounds)
        rates = {tier: block.rate for tier, block in static.items()}
        best = max(rates, key=rates.__getitem__)
        chain = max(rate for tier, rate in rates.items() if tier not in self._shapes.tree_tiers)
        blocks = [played, *static.values()]
        counted = sum(block.counted for block in blocks) / sum(block.tokens for block in blocks)
        return {
            "batch_size": batch_size,
            "profile": profile.name,
            "static": self._named(rates),
            "static_ms": self._named({tier: block.round_ms for tier, block in static.items()}),
            "best": str(self._shapes.name(best)),
            "adaptive": played.rate,
            "over_best": played.rate / rates[best],
            "over_chain": played.rate / chain,
            "best_over_chain": rates[best] / chain,
            "while_settling": settling.rate / rates[best],
            "counted_over_expected": counted,
            "played": self._named(dict(played.rounds_by_draft_len)),
            "controller": adaptive.state()["slots"]["1"],
            "expected_ms": adaptive.state()["round_ms"].get(str(batch_size), {}),
        }

    def _named(self, by_tier: dict[int, Any]) -> dict[str, Any]:
        return {str(self._shapes.name(tier)): value for tier, value in by_tier.items()}


def misses(row: Row) -> bool:
    wins = row["best_over_chain"] > 1 / MIN_STEADY
    return row["over_best"] < MIN_STEADY or (wins and row["over_chain"] <= 1)


def cells(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        sizes = (QUICK if options.quick else Sizes()) if models.is_8b else ZOO
        script = torch.zeros(STEPS, TOPK, device=options.device)
        with scripted_candidates(script):
            yield from Cells(models, script, sizes).run()


def cells_table(rows: Sequence[Row]) -> list[str]:
    shapes = list(rows[0]["static"])
    lines = []
    for row in rows:
        played = " ".join(f"{name}: {number}" for name, number in row["played"].items())
        lines.append(
            [
                str(row["batch_size"]),
                row["profile"],
                *(f"{row['static'][shape]:,.0f}" for shape in shapes),
                f"{row['adaptive']:,.0f}",
                f"{row['over_best']:.3f}" + " missed" * misses(row),
                *(f"{row[key]:.3f}" for key in ("over_chain", "best_over_chain")),
                f"{row['counted_over_expected']:.2f}",
                played,
            ]
        )
    titles = (
        "batch", "acceptance", *shapes, "adaptive", f"/ best (bar {MIN_STEADY})", "/ best chain",
        "best / best chain", "counted / expected", "rounds played",
    )  # fmt: skip
    return table(titles, lines)


SUBJECTS = (Subject("cells", "Adaptive trees, tokens per second", cells, cells_table),)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
