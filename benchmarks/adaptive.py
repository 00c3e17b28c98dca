"""Adaptive draft lengths and trees on one GPU, in one engine, against every static length and tree.

    python -m benchmarks.adaptive [lengths] [traffic] [trees] [--quick] [--output result.json]
    python -m benchmarks.adaptive --device cpu --quick        # the zoo: shows that it runs

lengths  draft length 0 over plain decoding, and steady cells of batch size x acceptance
traffic  phases and bursts of requests, also under SGLang's presets: every controller runs each
         phase for the same time with new requests, in rotating order, and keeps what it learned
trees    steady cells of batch size x acceptance by depth and rank, chains and trees to choose from

8B shape, bf16, random weights, a one-model EAGLE-3 head, greedy, prompts of 512 random tokens.
Acceptance is scripted (harness/forced_rounds.py). A static length is the same engine with the same
graphs, held to that length. Times are measured; tokens are those expected from the drafts that each
round verified (`counted_over_expected`: those that came out over these).

Each cell begins with a controller that knows only the round times of start-up. Static lengths run
before and after it in mirrored order, so that growing contexts affect all alike. Untimed rounds
come first, because a busy GPU lowers its clock. Goals: 0.98 of the best static length or tree, more
than the best chain where a tree is better than it by more than 2%, 1.05 of the best single length
for moving traffic, and 1.02 of plain decoding's time for draft length 0."""

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from benchmarks.harness.forced_rounds import (
    Block,
    ForcedRounds,
    Profile,
    by_rank,
    scripted_candidates,
)
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, crossed, main, number, table
from tllm_spec.config.adaptive_config import PRESETS
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

LADDER = (0, 1, 2, 3, 5)
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 8, "max_total_draft_tokens": 31}
COST_MODEL = "cost_model"
MIN_STEADY, MIN_MOVING = 0.98, 1.05
# Requests and acceptance of each phase.
TRAFFIC: Mapping[str, Sequence[tuple[int, float]]] = {
    "phases": ((24, 0.9), (24, 0.3), (24, 0.7), (24, 0.15)),
    "bursts": ((2, 0.85), (128, 0.2), (16, 0.6), (96, 0.5), (1, 0.9), (128, 0.15)),
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of rounds are per block. `room`: tokens that a request may have after its prompt."""

    batch_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128)
    acceptances: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9)
    profiles: tuple[Profile, ...] = (Profile(0.3), Profile(0.6), Profile(0.8, 0.9), Profile(0.9))
    prompt_len: int = 512
    room: int = 2304
    plain_rounds: int = 32  # four blocks each of plain decoding and of draft length 0
    settling_rounds: int = 100  # before the adaptive block; four times as many with trees
    adaptive_rounds: int = 80
    static_rounds: int = 24  # one block before and one after the adaptive block
    untimed_rounds: int = 8  # before each static block
    phase_seconds: float = 1.0

    @property
    def of_trees(self) -> "Sizes":
        return replace(
            self,
            batch_sizes=tuple(size for size in (1, 8) if size in self.batch_sizes),
            settling_rounds=4 * self.settling_rounds,
            room=max(self.room, 24 * self.settling_rounds),
        )


QUICK = Sizes(
    batch_sizes=(1, 8, 64, 128), profiles=Sizes.profiles[1:3], settling_rounds=60, plain_rounds=16
)
ZOO = Sizes((1, 4), (0.2, 0.9), Sizes.profiles[1:3], 32, 480, 4, 4, 8, 2, 1, 0.02)


def sizes_of(models: Models, options: Options) -> Sizes:
    return (QUICK if options.quick else Sizes()) if models.is_8b else ZOO


class Measurement:
    """An engine, its controller as it was built, and one for each static length and tree."""

    def __init__(
        self, models: Models, sizes: Sizes, script: torch.Tensor | None = None, **options: Any
    ) -> None:
        """options: of the speculation."""
        self.models, self.sizes = models, sizes
        speculation = models.eagle3(LADDER[-1], adaptive={"candidate_steps": LADDER}, **options)
        self.rounds = self.engine(sizes.room, script=script, speculative_config=speculation)
        self.shapes = self.rounds.shapes
        self._fresh = self.rounds.executor.parts.controller
        tiers = (*LADDER, *self.shapes.further_tiers)
        self.static = {tier: AdaptiveController.fixed(tier) for tier in tiers}

    def engine(self, room: int, **options: Any) -> ForcedRounds:
        sizes = self.sizes
        largest, max_seq_len = max(sizes.batch_sizes), sizes.prompt_len + room
        kv = {"enable_block_reuse": False, "max_tokens": largest * (max_seq_len + 256)}
        graphs = {"batch_sizes": list(sizes.batch_sizes)}
        own = {"cuda_graph_config": graphs, "kv_cache_config": kv}
        common = {"max_batch_size": largest, "max_seq_len": max_seq_len}
        return ForcedRounds(self.models.target, **self.models.options | own | common | options)

    def fresh(self) -> AdaptiveController:
        return copy.deepcopy(self._fresh)

    def named(self, by_tier: Mapping[int, Any]) -> dict[str, Any]:
        return {str(self.shapes.name(tier)): value for tier, value in by_tier.items()}

    def cell(self, batch_size: int, profile: Profile) -> Row:
        rounds, sizes, adaptive = self.rounds, self.sizes, self.fresh()
        rounds.set_profile(profile)
        settling = rounds.play(adaptive, rounds=sizes.settling_rounds)
        static, played = {tier: Block() for tier in self.static}, Block()
        # In the middle, contexts have their average length.
        for tier in (*static, None, *reversed(static)):
            if tier is None:
                played += rounds.play(adaptive, rounds=sizes.adaptive_rounds)
            else:
                rounds.play(self.static[tier], rounds=sizes.untimed_rounds)
                static[tier] += rounds.play(self.static[tier], rounds=sizes.static_rounds)
        rates = {tier: block.rate for tier, block in static.items()}
        best = max(rates, key=rates.__getitem__)
        chain = max(rate for tier, rate in rates.items() if tier not in self.shapes.further_tiers)
        blocks, state = [played, *static.values()], adaptive.state()
        counted = sum(block.counted for block in blocks) / sum(block.tokens for block in blocks)
        return {
            "batch_size": batch_size,
            "profile": profile.name,
            "static": self.named(rates),
            "static_ms": self.named({tier: block.round_ms for tier, block in static.items()}),
            "best": str(self.shapes.name(best)),
            "adaptive": played.rate,
            "over_best": played.rate / rates[best],
            "over_chain": played.rate / chain,
            "best_over_chain": rates[best] / chain,
            "while_settling": settling.rate / rates[best],
            "counted_over_expected": counted,
            "played": self.named(dict(played.rounds_by_draft_len)),
            "controller": state["slots"]["1"],
            "expected_ms": state["round_ms"].get(str(batch_size), {}),
        }


def lengths(options: Options) -> Iterator[Row]:
    """Plain decoding and draft length 0 take turns, on the same weights."""
    with open_models(options.shape, options.device) as models:
        measurement = Measurement(models, sizes_of(models, options))
        sizes, rounds = measurement.sizes, measurement.rounds
        plain = measurement.engine(4 * sizes.plain_rounds + 64, weights_of=rounds)
        for batch_size in sizes.batch_sizes:
            engines, blocks = (plain, rounds), [Block(), Block()]
            for engine in engines:
                engine.start(batch_size, sizes.prompt_len)
            for turn in (0, 1, 1, 0) * 2:
                blocks[turn] += engines[turn].play(measurement.static[0], rounds=sizes.plain_rounds)
            plain.stop()
            times = {"plain": blocks[0].round_ms, "zero": blocks[1].round_ms}
            for acceptance in sizes.acceptances:
                yield measurement.cell(batch_size, Profile(acceptance)) | times
        rounds.stop()


def lengths_table(rows: Sequence[Row]) -> list[str]:
    """Draft length 0 over plain decoding; tokens per second over the best static length."""
    cells = []
    for row in sorted(rows, key=lambda row: int(row["batch_size"])):
        batch = str(row["batch_size"])
        cells += [
            (batch, "plain ms", number(row["plain"])),
            (batch, "length 0 / plain", f"{row['zero'] / row['plain']:.3f}"),
            (batch, f"accepted {row['profile']}", f"{row['over_best']:.3f}"),
        ]
    return crossed("batch", cells)


def traffic(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        measurement = Measurement(models, sizes_of(models, options))
        rounds, sizes = measurement.rounds, measurement.sizes
        for name, phases in TRAFFIC.items():
            players = {COST_MODEL: measurement.fresh()}
            players |= {preset: _preset(preset, sizes.batch_sizes) for preset in PRESETS}
            players |= {str(tier): player for tier, player in measurement.static.items()}
            for number_of_requests, acceptance in phases:
                batch_size = min(number_of_requests, max(sizes.batch_sizes))
                rounds.set_profile(Profile(acceptance))
                rates = {}
                for player, controller in players.items():
                    rounds.start(batch_size, sizes.prompt_len // 2)
                    rates[player] = rounds.play(controller, seconds=sizes.phase_seconds).rate
                yield {"traffic": name, "batch_size": batch_size, "acceptance": acceptance} | rates
                turned = list(players.items())
                players = dict([*turned[4:], *turned[:4]])
        rounds.stop()


def _preset(name: str, batch_sizes: tuple[int, ...]) -> AdaptiveController:
    """Its draft lengths are clipped to the longest one that has graphs."""

    def shortened(slot: Any) -> Any:
        if not isinstance(slot, Mapping):
            return slot
        return {
            **slot,
            "candidate_steps": [min(steps, LADDER[-1]) for steps in slot["candidate_steps"]],
        }

    config = {key: shortened(value) for key, value in PRESETS[name].items()}
    return AdaptiveController.from_config(config, graph_batch_sizes=batch_sizes)


def over_best_static(phases: Sequence[Row]) -> tuple[int, dict[str, float]]:
    """The single draft length with the most tokens over all phases, which are equally long, and
    each policy's tokens over its tokens."""
    totals = {length: sum(phase[str(length)] for phase in phases) for length in LADDER}
    best = max(totals, key=totals.__getitem__)
    return best, {
        policy: sum(phase[policy] for phase in phases) / totals[best]
        for policy in (COST_MODEL, *PRESETS)
    }


def traffic_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name in dict.fromkeys(row["traffic"] for row in rows):
        best, shares = over_best_static([row for row in rows if row["traffic"] == name])
        lines.append([name, str(best), *(f"{share:.3f}" for share in shares.values())])
    return table(
        ("traffic", "best static length", f"{COST_MODEL} (goal {MIN_MOVING})", *PRESETS), lines
    )


def trees(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        sizes, topk = sizes_of(models, options).of_trees, int(TREE["dynamic_tree_max_topK"])
        script = torch.zeros(LADDER[-1], topk, device=options.device)
        rates = {"synthetic_acceptance_rates": [by_rank(0.5, topk)] * LADDER[-1]}
        with scripted_candidates(script):
            measurement = Measurement(models, sizes, script, **TREE, **rates)
            for batch_size, profile in product(sizes.batch_sizes, sizes.profiles):
                measurement.rounds.start(batch_size, sizes.prompt_len)
                yield measurement.cell(batch_size, profile)
            measurement.rounds.stop()


def misses(row: Row) -> bool:
    wins = row["best_over_chain"] > 1 / MIN_STEADY
    return row["over_best"] < MIN_STEADY or (wins and row["over_chain"] <= 1)


def trees_table(rows: Sequence[Row]) -> list[str]:
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
        "batch", "acceptance", *shapes, "adaptive", f"/ best (goal {MIN_STEADY})", "/ best chain",
        "best / best chain", "counted / expected", "rounds played",
    )  # fmt: skip
    return table(titles, lines)


SUBJECTS = (
    Subject("lengths", "Adaptive draft lengths", lengths, lengths_table),
    Subject("traffic", "Adaptive draft lengths, moving traffic", traffic, traffic_table),
    Subject("trees", "Adaptive trees, tokens per second", trees, trees_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
