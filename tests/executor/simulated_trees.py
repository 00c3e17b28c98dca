"""Rounds of a simulated engine that chooses between chains and trees: which children are accepted
is drawn, time comes from a table. As in `simulated_rounds.py` results are seen one round late, and
a round verifies what the round before drafted. A tree has the nodes that are likeliest at the true
acceptance."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from random import Random
from typing import Any

from benchmarks.harness.forced_rounds import Profile, by_rank
from tests.executor.simulated_rounds import MIN_STEADY, TIME_NOISE, Outcome, at, example_table
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN, DraftShape, DraftShapes
from tllm_spec.config.speculative_config import Eagle3DecodingConfig
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

BATCH_SIZES, ACCEPTANCES = (1, 4, 8, 16, 32), (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
OPTIONS: dict[str, Any] = {
    "speculative_model": "head",
    "max_draft_len": 5,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 8,
    "max_total_draft_tokens": 31,
}
SPEC = Eagle3DecodingConfig(**OPTIONS, adaptive={})
SHAPES = SPEC.shapes
TIERS = tuple(range(SHAPES.further_tiers.stop))
BEAMS_MS = {1: 0.06, 4: 0.08, 8: 0.12, 32: 0.35}  # more than a chain's step, by batch size
Path = tuple[int, ...]


@cache
def expected(shape: DraftShape, first: float) -> float:
    """Tokens of a request's round."""
    return Profile(first).expected(shape)


@cache
def children(shape: DraftShape, first: float) -> Mapping[Path, int]:
    """The number of children of every node of a tree."""
    rates, found = by_rank(first, shape.topk), dict[Path, int]()
    heap: list[tuple[float, Path]] = [(-rates[0], (0,))]
    for _ in range(shape.num_nodes):
        negative, path = heappop(heap)
        found[path[:-1]] = path[-1] + 1
        if len(path) < shape.depth:
            heappush(heap, (negative * rates[0], (*path, 0)))
        if (rank := path[-1] + 1) < shape.topk:
            heappush(heap, (negative / rates[rank - 1] * rates[rank], (*path[:-1], rank)))
    return found


def draw(chance: Random, shape: DraftShape, first: float) -> list[int]:
    """What a round of one request shows, as `path_ranks`."""
    tree, rates = children(shape, first), by_rank(first, shape.topk)
    shown: list[int] = []
    path: Path = ()
    while True:
        strayed = OFF_CHAIN * any(path)
        number, coin, rank = tree.get(path, 0), chance.random(), 0
        while rank < number and coin >= rates[rank]:
            coin -= rates[rank]
            rank += 1
        if rank == number:
            shown.append(strayed + END + number)
            return shown + [NOTHING] * (shape.path - len(shown))
        shown.append(strayed + rank)
        path = (*path, rank)


def num_accepted(shown: Sequence[int]) -> int:
    """Drafts of a row of `draw`."""
    return sum(value % OFF_CHAIN < END for value in shown if value != NOTHING)


class TreeSimulator:
    """times: seconds by batch size and tier."""

    def __init__(
        self,
        controller: AdaptiveController,
        shapes: DraftShapes,
        times: Mapping[int, Sequence[float]],
        seed: int,
    ) -> None:
        self._controller, self._shapes, self._times = controller, shapes, times
        self._chance, self._made = Random(seed), 0
        self._late: deque[tuple[int, list[int], int, float | None, list[list[int]]]] = deque()

    def run(self, batch_size: int, first: float, seconds: float) -> Outcome:
        """Expected tokens at the true acceptance."""
        outcome = Outcome()
        while outcome.seconds < seconds:
            self._round(batch_size, first, outcome)
        return outcome

    def _round(self, batch_size: int, first: float, outcome: Outcome) -> None:
        tier = self._controller.tier_for(batch_size)
        verified, is_pure = min(tier, self._made), tier == self._made
        self._made, shape = tier, self._shapes.of(verified)
        ranks = [draw(self._chance, shape, first) for _ in range(batch_size * (verified > 0))]
        accepted = list(map(num_accepted, ranks))
        spent = self._times[batch_size][tier]
        outcome.seconds += spent
        outcome.tokens += batch_size * expected(shape, first)
        noisy = spent * self._chance.gauss(1, TIME_NOISE)
        self._late.append(
            (batch_size, accepted or [0] * batch_size, verified, noisy if is_pure else None, ranks)
        )
        if len(self._late) > 1:
            size, counts, steps, time, shown = self._late.popleft()
            self._controller.observe(ObservedRound(size, counts, steps, time, ranks=shown))


def example_times() -> dict[int, list[float]]:
    """Seconds by batch size and tier."""
    linears, plain, draft_ms = example_table()

    def round_ms(size: int, tier: int) -> float:
        shape = SHAPES.of(tier)
        rows_ms = at(linears, size * shape.window) - at(linears, size)
        step_ms = draft_ms + (at(BEAMS_MS, size) if shape.is_tree else 0.0)
        return at(plain, size) + rows_ms + shape.depth * step_ms

    return {size: [round_ms(size, tier) / 1e3 for tier in TIERS] for size in BATCH_SIZES}


TIMES = example_times()


def controller() -> AdaptiveController:
    table = {size: dict(enumerate(row)) for size, row in TIMES.items()}
    return controller_for(
        SPEC, graph_batch_sizes=BATCH_SIZES, round_times=MeasuredRoundTimes(table)
    )


def static_rates(batch_size: int, first: float) -> list[float]:
    """Tokens per second of each tier, exactly."""
    return [
        batch_size * expected(SHAPES.of(tier), first) / TIMES[batch_size][tier] for tier in TIERS
    ]


def cell(batch_size: int, first: float, seed: int, seconds: float) -> dict[str, Any]:
    rates = static_rates(batch_size, first)
    best = rates.index(max(rates))
    simulator = TreeSimulator(controller(), SHAPES, TIMES, seed)
    rate = simulator.run(batch_size, first, seconds).rate
    chain = max(rates[: SHAPES.further_tiers.start])
    return {
        "batch_size": batch_size,
        "acceptance": first,
        "best": SHAPES.name(best),
        "over_best": rate / max(rates),
        "over_chain": rate / chain,
        "best_over_chain": max(rates) / chain,
    }


def misses(row: dict[str, Any]) -> bool:
    wins = row["best_over_chain"] > 1 / MIN_STEADY
    return row["over_best"] < MIN_STEADY or (wins and row["over_chain"] <= 1)
