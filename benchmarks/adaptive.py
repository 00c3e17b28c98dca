"""The adaptive draft length in a simulated engine, against every static draft length (0 = plain).

    python -m benchmarks.adaptive [--output result.json] [--seconds 20] [--seeds 3]

- Steady cells, batch size x acceptance: the worst seed over the best static length, from the first
  round on.
- Moving traffic: tokens per second over the best single static length.
- Hopeless drafts: the first rounds of an engine whose drafts are never right, over plain decoding.
- Errors of start-up: steady cells where every measured round time has an error of its own.

The policies are the cost model with lengths 0 to 7 and `ema` with each of SGLang's presets. Round
times are an example table, not a measurement; only the time of a decision is measured here."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.simulator import (
    GRAPH_BATCH_SIZES,
    MAX_STEPS,
    HeavyMix,
    Simulator,
    Traffic,
    bursts,
    example_round_times,
    padded_times,
    phases,
    steady,
)
from tllm_spec.bench.break_even import expected_tokens
from tllm_spec.config.adaptive_config import PRESETS
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

BATCH_SIZES, ACCEPTANCES = (1, 4, 8, 16, 32, 64, 128), (0.2, 0.4, 0.6, 0.8, 0.9)
COST_MODEL = "cost_model"
POLICIES: dict[str, Any] = {
    COST_MODEL: {"candidate_steps": list(range(MAX_STEPS + 1))},
    **{preset: preset for preset in PRESETS},
}
MOVING: dict[str, Callable[[int], Traffic]] = {
    "phases": lambda seed: phases(4.0),
    "bursts": lambda seed: bursts(3.0),
    "heavy mix": lambda seed: HeavyMix(seed, 20.0),
}
MIN_STEADY, MIN_MOVING, MAX_DECISION_US = 0.98, 1.05, 20.0
HOPELESS, FIRST_ROUNDS = 1e-9, (200, 1000)
TIME_ERROR, ERROR_SEEDS = 0.015, 24  # relative, of each time that start-up measures
SETTLING_ROUNDS, COUNTED_ROUNDS = 60, 80  # as on the GPU
TIMES = example_round_times()
TRUE_TIMES = padded_times(TIMES)


def controller(policy: str) -> AdaptiveController:
    return AdaptiveController.from_config(
        POLICIES[policy], graph_batch_sizes=GRAPH_BATCH_SIZES, round_times=TIMES
    )


def static_rates(batch_size: int, acceptance: float) -> list[float]:
    """Tokens per second of each draft length, exactly."""
    return [
        batch_size * expected_tokens(acceptance, steps) / TRUE_TIMES(batch_size, steps)
        for steps in range(MAX_STEPS + 1)
    ]


def steady_cell(
    policy: str, batch_size: int, acceptance: float, seconds: float, seed: int
) -> float:
    """The policy's rate over the best static one."""
    simulator = Simulator(controller(policy), TRUE_TIMES, seed)
    rate = simulator.run(steady(batch_size, acceptance), seconds).rate
    return rate / max(static_rates(batch_size, acceptance))


def moving_rate(controls: AdaptiveController, kind: str, seconds: float, seed: int) -> float:
    return Simulator(controls, TRUE_TIMES, seed).run(MOVING[kind](seed), seconds).rate


def misjudged_cell(batch_size: int, acceptance: float, seed: int) -> float:
    """The cost model's rate over the best static one after a start-up that timed every length
    twice, each time with an error."""
    chance, lengths = Random(seed * 1000 + batch_size), range(MAX_STEPS + 1)
    measured = {
        k: TRUE_TIMES(batch_size, k)
        * (1 + statistics.fmean(chance.gauss(0, TIME_ERROR) for _ in range(2)))
        for k in lengths
    }
    controls = AdaptiveController.from_config(
        POLICIES[COST_MODEL],
        graph_batch_sizes=[batch_size],
        round_times=MeasuredRoundTimes({batch_size: measured}, has_contexts=True),
    )
    simulator, traffic = Simulator(controls, TRUE_TIMES, seed), steady(batch_size, acceptance)
    simulator.run_rounds(traffic, SETTLING_ROUNDS)
    before = replace(simulator.outcome)
    after = simulator.run_rounds(traffic, COUNTED_ROUNDS)
    rate = (after.tokens - before.tokens) / (after.seconds - before.seconds)
    return rate / max(static_rates(batch_size, acceptance))


def decision_us(batch_size: int, num_rounds: int = 3000) -> float:
    """Median microseconds of `observe`, with 8 draft lengths and mixed acceptance."""
    controls, found = controller(COST_MODEL), []
    for _ in range(num_rounds):
        steps = controls.steps_for(batch_size)
        num_accepted = [min(steps, (0, 3, 2, 1)[index % 4]) for index in range(batch_size)]
        start = time.perf_counter()
        controls.observe(batch_size, num_accepted, steps, 0.005)
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e6


def measure_steady(seconds: float, seeds: int) -> list[dict[str, Any]]:
    rows = []
    print("batch accept best K  plain  " + "  ".join(f"{policy:>12}" for policy in POLICIES))
    for batch_size, acceptance in product(BATCH_SIZES, ACCEPTANCES):
        rates = static_rates(batch_size, acceptance)
        best = rates.index(max(rates))
        shares = {
            policy: min(
                steady_cell(policy, batch_size, acceptance, seconds, seed) for seed in range(seeds)
            )
            for policy in POLICIES
        }
        plain = rates[0] / rates[best]
        row = {"batch_size": batch_size, "acceptance": acceptance, "best_draft_len": best}
        rows.append({**row, "plain": plain, **shares})
        cells = "  ".join(f"{share:12.3f}" for share in shares.values())
        print(f"{batch_size:5} {acceptance:6} {best:6} {plain:6.3f}  {cells}", flush=True)
    return rows


def measure_moving(seconds: float, seeds: int) -> list[dict[str, Any]]:
    rows = []
    print("  traffic seed best K  plain  " + "  ".join(f"{policy:>12}" for policy in POLICIES))
    for kind, seed in product(MOVING, range(seeds)):
        statics = [
            moving_rate(AdaptiveController.fixed(steps), kind, seconds, seed)
            for steps in range(MAX_STEPS + 1)
        ]
        best = max(statics)
        shares = {
            policy: moving_rate(controller(policy), kind, seconds, seed) / best
            for policy in POLICIES
        }
        plain, length = statics[0] / best, statics.index(best)
        row = {"traffic": kind, "seed": seed, "best_draft_len": length, "plain": plain}
        rows.append({**row, **shares})
        cells = "  ".join(f"{share:12.3f}" for share in shares.values())
        print(f"{kind:>9} {seed:4} {length:6} {plain:6.3f}  {cells}", flush=True)
    return rows


def measure_hopeless(seeds: int) -> list[dict[str, Any]]:
    """The cost model's rate over plain decoding's, in the first rounds of an engine."""
    rows = []
    for batch_size in BATCH_SIZES:
        traffic, plain = steady(batch_size, HOPELESS), static_rates(batch_size, HOPELESS)[0]
        shares = {
            str(rounds): min(
                Simulator(controller(COST_MODEL), TRUE_TIMES, seed).run_rounds(traffic, rounds).rate
                / plain
                for seed in range(seeds)
            )
            for rounds in FIRST_ROUNDS
        }
        rows.append({"batch_size": batch_size, **shares})
        cells = ", ".join(f"{share:.3f} in {rounds}" for rounds, share in shares.items())
        print(f"hopeless drafts, batch {batch_size}: {cells} rounds", flush=True)
    return rows


def measure_misjudged(seeds: int) -> float:
    """Share of steady cells below the bar."""
    cells = [misjudged_cell(*each) for each in product(BATCH_SIZES, ACCEPTANCES, range(seeds))]
    share = sum(cell < MIN_STEADY for cell in cells) / len(cells)
    print(
        f"start-up times off by {TIME_ERROR:.1%}: {share:.1%} of {len(cells)} cells below "
        f"{MIN_STEADY}, on average {statistics.fmean(cells):.4f}"
    )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="where the rows go as JSON")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated, of a steady cell")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "round_times": "example table, not measured",
        "steady": measure_steady(args.seconds, args.seeds),
        "moving": measure_moving(6 * args.seconds, args.seeds),
        "hopeless": measure_hopeless(args.seeds),
        "share_of_misjudged_cells": measure_misjudged(ERROR_SEEDS),
        "observe_us": {str(size): decision_us(size) for size in BATCH_SIZES},
    }
    worst = min(row[COST_MODEL] for row in report["steady"])
    least = min(row[COST_MODEL] for row in report["moving"])
    slowest = max(report["observe_us"].values())
    print(
        f"worst steady cell {worst:.3f} (bar {MIN_STEADY}), moving traffic {least:.3f} (bar "
        f"{MIN_MOVING}), observe {slowest:.1f} us (bar {MAX_DECISION_US:g})"
    )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if worst >= MIN_STEADY and least >= MIN_MOVING and slowest <= MAX_DECISION_US else 1


if __name__ == "__main__":
    sys.exit(main())
