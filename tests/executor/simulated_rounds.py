"""Rounds of a simulated engine under an `AdaptiveController`: acceptance is drawn, time comes from
a table.

It has the unkind parts of a real engine: results reach the controller one round late, a round's
drafts were made in the round before (so after plain decoding the first round has none, and after a
rise too few), and times are noisy. Tokens are counted by their expectation at the true acceptance,
so that luck does not blur a comparison."""

import json
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tllm_spec.bench.break_even import expected_tokens
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

EXAMPLE_TABLE = Path(__file__).with_name("example_round_times.json")
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_STEPS = 7
PHASE_ACCEPTANCES = (0.9, 0.3, 0.7, 0.15)
TIME_NOISE = 0.02  # standard deviation of a round's time, relative

Traffic = Callable[
    [float], np.ndarray
]  # seconds since the start -> acceptance of every request under way


def example_table() -> tuple[dict[int, float], dict[int, float], float]:
    """Milliseconds of all linears by rows and of a plain round by batch size, and of a draft."""
    tree = json.loads(EXAMPLE_TABLE.read_text(encoding="utf-8"))
    linears, plain = (
        {int(number): ms for number, ms in tree[name].items()}
        for name in ("linears_ms", "plain_ms")
    )
    return linears, plain, float(tree["draft_ms"])


def at(values: dict[int, float], number: int) -> float:
    """Between neighbours; beyond the last in proportion."""
    found = float(np.interp(number, list(values), list(values.values())))
    return found * max(1.0, number / max(values))


def example_round_times() -> MeasuredRoundTimes:
    linears, plain, draft_ms = example_table()

    def round_ms(size: int, steps: int) -> float:
        added = at(linears, size * (steps + 1)) - at(linears, size)
        return at(plain, size) + added + steps * draft_ms

    return MeasuredRoundTimes(
        {
            size: {steps: round_ms(size, steps) / 1e3 for steps in range(MAX_STEPS + 1)}
            for size in GRAPH_BATCH_SIZES
        }
    )


@dataclass
class Outcome:
    tokens: float = 0.0
    seconds: float = 0.0
    num_rounds: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # draft length: rounds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulator:
    def __init__(
        self,
        controller: AdaptiveController,
        times: Callable[[int, int], float],
        seed: int,
        context_at: Callable[[float], int] = lambda now: 0,
    ) -> None:
        """context_at: the average context, by seconds since the start."""
        self._controller, self._times = controller, times
        self._context_at = context_at
        self._rng = np.random.default_rng(seed)
        self._seen_late: deque[tuple[Any, ...]] = deque()
        self._drafts_ready = 0
        self.outcome = Outcome()

    def run(self, traffic: Traffic, seconds: float) -> Outcome:
        end = self.outcome.seconds + seconds
        while self.outcome.seconds < end:
            self._round(traffic(self.outcome.seconds))
        return self.outcome

    def run_rounds(self, traffic: Traffic, rounds: int) -> Outcome:
        for _ in range(rounds):
            self._round(traffic(self.outcome.seconds))
        return self.outcome

    def _round(self, acceptance: np.ndarray) -> None:
        batch_size, outcome = len(acceptance), self.outcome
        self._controller.note_context(self._context_at(outcome.seconds))
        context_len = self._controller.context_len
        steps = self._controller.tier_for(batch_size)
        verified = min(steps, self._drafts_ready)
        self._drafts_ready = steps
        # P(n or more accepted) = acceptance ** n, so a uniform number gives n; clipped to what the
        # window shows.
        uniform = self._rng.random(batch_size)
        num_accepted = np.minimum(np.log(uniform) / np.log(acceptance), verified).astype(int)
        seconds = self._times(batch_size, steps)
        outcome.tokens += float(np.sum((1 - acceptance ** (verified + 1)) / (1 - acceptance)))
        outcome.seconds += seconds
        outcome.num_rounds += 1
        outcome.steps[steps] = outcome.steps.get(steps, 0) + 1
        noisy = seconds * float(self._rng.normal(1, TIME_NOISE))
        self._seen_late.append((batch_size, num_accepted.tolist(), verified, noisy, context_len))
        if len(self._seen_late) > 1:  # results are read a round late
            *seen, context_len = self._seen_late.popleft()
            self._controller.observe(ObservedRound(*seen, context_len=context_len))


def padded_times(source: MeasuredRoundTimes) -> Callable[[int, int], float]:
    """True round times: a batch runs in the next larger graph."""
    known = {
        (size, steps): source.round_time(size, steps)
        for size in GRAPH_BATCH_SIZES
        for steps in range(MAX_STEPS + 1)
    }
    return lambda size, steps: known[GRAPH_BATCH_SIZES[bisect_left(GRAPH_BATCH_SIZES, size)], steps]


def steady(batch_size: int, acceptance: float) -> Traffic:
    requests = np.full(batch_size, acceptance)
    return lambda now: requests


def phases(seconds: float) -> Traffic:
    """Some users whose texts change: code, prose, tables."""
    kinds = [np.full(24, acceptance) for acceptance in PHASE_ACCEPTANCES]
    return lambda now: kinds[int(now / seconds) % len(kinds)]


def bursts(seconds: float) -> Traffic:
    """Quiet hours with one or two users, then a crowd, then some; the crowd's texts are harder to
    draft."""
    crowds = [(2, 0.85), (128, 0.2), (16, 0.6), (96, 0.5), (1, 0.9), (128, 0.15)]
    kinds = [np.full(size, acceptance) for size, acceptance in crowds]
    return lambda now: kinds[int(now / seconds) % len(kinds)]


class HeavyMix:
    """Requests that are each easy, middling or hopeless to draft, with heavy-tailed lives, while
    their number wanders between 1 and 128 and the share of easy ones between most and few."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._rng, self._period = np.random.default_rng(seed), seconds
        self._acceptance, self._ends = np.empty(0), np.empty(0)

    def __call__(self, now: float) -> np.ndarray:
        alive = self._ends > now
        self._acceptance, self._ends = self._acceptance[alive], self._ends[alive]
        wanted = round(2 ** (3.5 * (1 - np.cos(2 * np.pi * now / self._period))))
        num_new = wanted - len(self._ends)
        if num_new > 0:
            easy = 0.5 + 0.45 * np.sin(2 * np.pi * now / (1.7 * self._period))
            kinds = self._rng.choice(
                [0.92, 0.5, 0.1], size=num_new, p=[easy, 0.4 * (1 - easy), 0.6 * (1 - easy)]
            )
            lives = np.minimum(0.5 * (1 + self._rng.pareto(1.5, size=num_new)), self._period / 4)
            self._acceptance = np.concatenate([self._acceptance, kinds])
            self._ends = np.concatenate([self._ends, now + lives])
        return self._acceptance[:128]


BATCH_SIZES, ACCEPTANCES = (1, 4, 8, 16, 32, 64, 128), (0.2, 0.4, 0.6, 0.8, 0.9)
COST_MODEL = {"candidate_steps": list(range(MAX_STEPS + 1))}
MOVING: dict[str, Callable[[int], Traffic]] = {
    "phases": lambda seed: phases(4.0),
    "bursts": lambda seed: bursts(3.0),
    "heavy mix": lambda seed: HeavyMix(seed, 20.0),
}
MIN_STEADY, MIN_MOVING = 0.98, 1.05
HOPELESS, FIRST_ROUNDS = 1e-9, (200, 1000)
TIME_ERROR = 0.015  # relative, of each time that start-up measures
SETTLING_ROUNDS, COUNTED_ROUNDS = 60, 80  # as on the GPU
TIMES = example_round_times()
TRUE_TIMES = padded_times(TIMES)


def controller() -> AdaptiveController:
    return AdaptiveController.from_config(
        COST_MODEL, graph_batch_sizes=GRAPH_BATCH_SIZES, round_times=TIMES
    )


def static_rates(batch_size: int, acceptance: float) -> list[float]:
    """Tokens per second of each draft length, exactly."""
    return [
        batch_size * expected_tokens(acceptance, steps) / TRUE_TIMES(batch_size, steps)
        for steps in range(MAX_STEPS + 1)
    ]


def steady_cell(batch_size: int, acceptance: float, seconds: float, seed: int) -> float:
    """The cost model's rate over the best static one."""
    simulator = Simulator(controller(), TRUE_TIMES, seed)
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
        COST_MODEL,
        graph_batch_sizes=[batch_size],
        round_times=MeasuredRoundTimes({batch_size: measured}, has_contexts=True),
    )
    simulator, traffic = Simulator(controls, TRUE_TIMES, seed), steady(batch_size, acceptance)
    simulator.run_rounds(traffic, SETTLING_ROUNDS)
    before = replace(simulator.outcome)
    after = simulator.run_rounds(traffic, COUNTED_ROUNDS)
    rate = (after.tokens - before.tokens) / (after.seconds - before.seconds)
    return rate / max(static_rates(batch_size, acceptance))


def hopeless_rates(seeds: int) -> list[dict[str, Any]]:
    """The cost model's rate over plain decoding's, in the first rounds of an engine."""
    rows = []
    for batch_size in BATCH_SIZES:
        traffic, plain = steady(batch_size, HOPELESS), static_rates(batch_size, HOPELESS)[0]
        shares = {
            str(rounds): min(
                Simulator(controller(), TRUE_TIMES, seed).run_rounds(traffic, rounds).rate / plain
                for seed in range(seeds)
            )
            for rounds in FIRST_ROUNDS
        }
        rows.append({"batch_size": batch_size, **shares})
    return rows


def share_of_misjudged_cells(seeds: int) -> float:
    """Share of steady cells below the bar."""
    cells = [misjudged_cell(*each) for each in product(BATCH_SIZES, ACCEPTANCES, range(seeds))]
    return sum(cell < MIN_STEADY for cell in cells) / len(cells)
