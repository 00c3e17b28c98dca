"""Rounds of a simulated engine that chooses between chains and trees: which children are accepted
is drawn, time comes from a table. As in `simulator.py` results are seen one round late, and a round
verifies what the round before drafted. A tree has the nodes that are likeliest at the true
acceptance."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from random import Random

from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.expected_path import expected_accepted
from tllm_spec.kernels.rank_codes import END, NOTHING, OFF_CHAIN

# Acceptance of each further child, given that those before it were rejected.
NEXT_RANKS = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08)
TIME_NOISE = 0.02  # standard deviation of a round's time, relative
Path = tuple[int, ...]


@cache
def by_rank(first: float, topk: int) -> tuple[float, ...]:
    """Scripted acceptance: the probability of each child of a node."""
    found, left = [first], 1 - first
    for share in NEXT_RANKS[: topk - 1]:
        found.append(left * share)
        left *= 1 - share
    return tuple(found)


@cache
def expected(shape: DraftShape, first: float) -> float:
    """Tokens of a request's round."""
    return 1 + expected_accepted(shape, [by_rank(first, shape.topk)] * max(shape.depth, 1))


@cache
def children(shape: DraftShape, first: float) -> Mapping[Path, int]:
    """Of every node of a tree."""
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


@dataclass
class Outcome:
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


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
        tier = self._controller.steps_for(batch_size)
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
            self._controller.observe(size, counts, steps, time, ranks=shown)
