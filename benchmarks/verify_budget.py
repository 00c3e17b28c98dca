"""Requests that share the rows of a round, against the best draft length for all of them.

    python -m benchmarks.verify_budget [simulated] [rounds] [--quick] [--output result.json]
    python -m benchmarks.verify_budget --device cpu --quick   # the zoo: shows that it runs

simulated  without an engine, with round times of benchmarks.adaptive
rounds  tokens per second by batch size and traffic: every uniform draft length, every budget of
        rows, and enable_adaptive_verification, which chooses

8B shape, bf16, random weights, a one-model EAGLE-3 head, greedy. Acceptance is scripted by token
(harness/scripted_tokens.py): the probability of a draft is drawn from a Beta distribution, for
mixed traffic with mean 0.9 in one half of the requests and 0.2 in the other, and the drafter knows
it with noise. Tokens are those expected from the drafts that each round verified. All choices share
an engine and its graphs. Each runs two blocks, in mirrored order with equal contexts; the learned
choice settles before. Goals over the best uniform length: 0.99, and for mixed traffic 1.12 at batch
64 and 1.15 at 128. The oracle knows the drafts' true probabilities; its rounds take what these
took."""

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.harness.engine import Rounds, synchronize
from benchmarks.harness.forced_rounds import Block
from benchmarks.harness.models import Models, open_models
from benchmarks.harness.report import Options, Row, Subject, main, table
from benchmarks.harness.scripted_tokens import MIXED, TokenScript, scripted_tokens
from benchmarks.harness.simulated_rows import Simulation, round_ms
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

STEPS = (0, 1, 2, 3, 5, 7)
TRAFFIC: Mapping[str, Sequence[float]] = {
    "mixed": MIXED, "0.9": (0.9,), "0.8": (0.8,), "0.6": (0.6,), "0.3": (0.3,)
}  # fmt: skip
GOALS = {("mixed", 64): 1.12, ("mixed", 128): 1.15}
SIZES = (16, 32, 64, 128, 256)
QUICK_CELLS = (("mixed", 32), ("0.9", 32), ("mixed", 64), ("0.6", 64), ("mixed", 128))
PROMPT_LEN, MAX_SEQ_LEN = 64, {True: 1200, False: 480}  # of the 8B shape, and of the zoo
CHOICE = -1  # the player that chooses its tier
BLOCK_ROUNDS, SETTLING_ROUNDS, UNTIMED_ROUNDS = {True: 10, False: 2}, {True: 64, False: 6}, 3


class Measurement:
    """An engine whose rounds have graphs for every length and every budget."""

    def __init__(self, models: Models, sizes: Sequence[int], script: TokenScript) -> None:
        self.script = script
        adaptive = {"candidate_steps": STEPS}
        speculation = models.eagle3(STEPS[-1], adaptive=adaptive, enable_adaptive_verification=True)
        self.is_8b = models.is_8b
        max_seq_len = MAX_SEQ_LEN[models.is_8b]
        kv = {"enable_block_reuse": False, "max_tokens": max(sizes) * (max_seq_len + 64)}
        own = {"cuda_graph_config": {"batch_sizes": list(sizes)}, "kv_cache_config": kv}
        own["guided_decoding_backend"] = None
        with mock.patch.object(BuildPlan, "round_keys", all_keys):
            self.rounds = Rounds(
                models.target,
                max_batch_size=max(sizes),
                max_seq_len=max_seq_len,
                speculative_config=speculation,
                **(models.options | own),
            )
        self.parts = self.rounds.executor.parts
        self.shapes = self.parts.slots.shapes
        self._fresh = self.parts.controller
        tiers = (*STEPS, *self.shapes.budgeted_tiers)
        self.players = {tier: AdaptiveController.fixed(tier) for tier in tiers}

    def cell(self, traffic: str, batch_size: int) -> Row:
        self.script.set_means(TRAFFIC[traffic])
        choosing, number = copy.deepcopy(self._fresh), BLOCK_ROUNDS[self.is_8b]
        self._start(batch_size)
        self.play(choosing, SETTLING_ROUNDS[self.is_8b])
        tiers = list(self.players)
        order = [*tiers[: len(tiers) // 2], CHOICE, *tiers[len(tiers) // 2 :]]
        players, blocks = self.players | {CHOICE: choosing}, {tier: Block() for tier in order}
        for each in (order, order[::-1]):
            self._start(batch_size)
            for tier in each:
                blocks[tier] += self.play(players[tier], number)
        played = blocks.pop(CHOICE)
        rates = {tier: block.rate for tier, block in blocks.items()}
        best = max(STEPS, key=rates.__getitem__)
        ms = {tier: block.round_ms for tier, block in blocks.items()}
        simulation = Simulation(batch_size, TRAFFIC[traffic])
        oracle = 1e3 * max(
            simulation.play(self.shapes.of(tier), 20).oracle / ms[tier] for tier in blocks
        )
        named = self.shapes.name
        budget = max(self.shapes.budgeted_tiers, key=rates.__getitem__)
        return {
            "traffic": traffic,
            "batch_size": batch_size,
            "rates": {str(named(tier)): rate for tier, rate in rates.items()},
            "ms": {str(named(tier)): each for tier, each in ms.items()},
            "best": best,
            "chosen": played.rate / rates[best],
            "best_budget": str(named(budget)),
            "budget": rates[budget] / rates[best],
            "oracle": oracle / rates[best],
            "plain": rates[0] / rates[best],
            "controller": choosing.state()["slots"],
        }

    def _start(self, batch_size: int) -> None:
        self._control(self.players[0])
        self.rounds.start(batch_size, PROMPT_LEN)

    def play(self, controller: AdaptiveController, number: int) -> Block:
        self._control(controller)
        for _ in range(UNTIMED_ROUNDS):
            self.rounds.executor.step()
        synchronize()
        before, start = float(self.script.total), time.perf_counter()
        self.rounds.run(number)
        synchronize()
        seconds = time.perf_counter() - start
        rounds = Counter({CHOICE: number})  # whatever their tiers were
        return Block(seconds, float(self.script.total) - before, rounds_by_draft_len=rounds)

    def _control(self, controller: AdaptiveController) -> None:
        self.parts.controller, self.parts.tier_for = controller, controller.tier_for


def all_keys(plan: BuildPlan, sizes: Sequence[int]) -> list[GraphKey]:
    """Every tier at every size, without temperatures."""
    shapes = plan.shapes
    tiers = (*STEPS, *shapes.budgeted_tiers)
    return [GraphKey(size, shapes.of(tier), False) for size in sizes for tier in tiers]


def simulated(options: Options) -> Iterator[Row]:
    number = 60 if options.quick else 300
    for batch_size in SIZES[:4]:
        for traffic in TRAFFIC:
            yield simulated_row(
                DraftShapes.with_budgets(STEPS[-1], STEPS), batch_size, traffic, number
            )


def simulated_row(shapes: DraftShapes, batch_size: int, traffic: str, number: int) -> Row:
    """Every tier for so many rounds, and the choice after as many."""
    lengths = [0, *(tier for tier in shapes.compared_tiers if tier not in shapes.budgeted_tiers)]
    tiers = (*lengths, *shapes.budgeted_tiers)
    ms = {tier: round_ms(shapes.of(tier), batch_size) for tier in tiers}
    choosing = AdaptiveController.from_config(
        {"candidate_steps": lengths},
        graph_batch_sizes=(batch_size,),
        round_times=MeasuredRoundTimes({batch_size: ms}),
        shapes=shapes,
    )
    simulation = partial(Simulation, batch_size, TRAFFIC[traffic])
    found = {
        tier: [each / ms[tier] for each in simulation().play(shapes.of(tier), number)]
        for tier in tiers
    }
    best = max(lengths, key=lambda tier: found[tier][0])
    budget = max(shapes.budgeted_tiers, key=lambda tier: found[tier][0])
    rate = found[best][0]
    return {
        "batch_size": batch_size,
        "traffic": traffic,
        "best": best,
        "plain": found[0][0] / rate,
        "oracle": max(oracle for _, oracle in found.values()) / rate,
        "budget": found[budget][0] / rate,
        "best_budget": str(shapes.name(budget)),
        "chosen": simulation().chosen_rate(choosing, shapes, number) / rate,
    }


def rounds(options: Options) -> Iterator[Row]:
    with open_models(options.shape, options.device) as models:
        sizes = SIZES if models.is_8b else (2, 20)
        cells: Sequence[tuple[str, int]] = [(name, size) for size in sizes for name in TRAFFIC]
        if options.quick:
            cells = QUICK_CELLS if models.is_8b else [("mixed", size) for size in sizes]
        script = TokenScript.new(max(sizes) + 1, STEPS[-1], options.device)
        with scripted_tokens(script):
            measurement = Measurement(models, sizes, script)
            for traffic, batch_size in cells:
                yield measurement.cell(traffic, batch_size)
            measurement.rounds.stop()


def rates_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        goal = GOALS.get((row["traffic"], row["batch_size"]), 0.99)
        found: list[Any] = [f"{row[name]:.3f}" for name in ("plain", "oracle", "budget", "chosen")]
        found[2] += f" ({row['best_budget']})"
        found[3] += f" (goal {goal})" + " missed" * (row["chosen"] < goal)
        lines.append([str(row["batch_size"]), row["traffic"], str(row["best"]), *found])
    titles = ("batch", "traffic", "best length", "plain", "oracle", "best budget", "chosen")
    return table(titles, lines)


SUBJECTS = (
    Subject("simulated", "Simulated tokens per second", simulated, rates_table),
    Subject("rounds", "Tokens per second over the best uniform length", rounds, rates_table),
)

if __name__ == "__main__":
    sys.exit(main(SUBJECTS, __doc__))
