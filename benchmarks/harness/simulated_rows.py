"""Rounds of requests that share rows, without an engine: what the choice of drafts reaches, and
what it would reach if it knew their true probabilities."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from benchmarks.harness.report import load
from benchmarks.harness.scripted_tokens import NOISE, QUANTILES, quantiles
from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.kernels.slots.choose_rows import (
    EXPECTED_SCALE,
    ChosenRows,
    DraftValues,
    choose_rows,
    features_of,
    learn_values,
)

DRAFT_MS, DRAFT_MS_PER_ROW = 0.22, 0.001  # of a draft step; the rest of a round has its rows
WARM_UP_ROUNDS = 40


class Tokens(NamedTuple):
    """The mean tokens of a round of the whole batch."""

    reached: float
    oracle: float


class Round(NamedTuple):
    """`expected`: of the batch, by budget."""

    tokens: Tokens
    num_accepted: list[int]
    expected: list[float]


class Simulation:
    """means: as `TokenScript.set_means`."""

    def __init__(self, batch_size: int, means: Sequence[float]) -> None:
        rows = [quantiles(means[slot % len(means)]) for slot in range(batch_size)]
        self._table, self._slots = torch.stack(rows), torch.arange(batch_size)
        self._generator = torch.Generator().manual_seed(0)

    def play(self, shape: DraftShape, rounds: int) -> Tokens:
        """Rounds of this shape, after some that are not counted."""
        values = self._values(shape.num_nodes)
        played = [self._round(values, shape).tokens for _ in range(WARM_UP_ROUNDS + rounds)]
        reached, oracle = zip(*played[WARM_UP_ROUNDS:], strict=True)
        return Tokens(sum(reached) / rounds, sum(oracle) / rounds)

    def chosen_rate(self, own: AdaptiveController, shapes: DraftShapes, rounds: int) -> float:
        """Tokens a millisecond of rounds whose tiers the controller chooses, after as many rounds
        that are not counted."""
        batch_size, values = (
            len(self._slots),
            self._values(shapes.longest.num_nodes, shapes.budgets),
        )
        tokens = ms = 0.0
        for number in range(2 * rounds):
            tier = own.tier_for(batch_size)
            played = self._round(values, shapes.of(tier))
            accepted = played.num_accepted
            own.observe(
                ObservedRound(batch_size, accepted, tier, num_drafted=0, expected=played.expected)
            )
            if number >= rounds:
                tokens += played.tokens.reached
                ms += round_ms(shapes.of(tier), batch_size)
        return tokens / ms

    def _values(self, num_drafts: int, budgets: Sequence[tuple[int, float]] = ()) -> DraftValues:
        return DraftValues.of_slots(len(self._slots), num_drafts, torch.device("cpu"), budgets)

    def _round(self, values: DraftValues, shape: DraftShape) -> Round:
        batch_size, depth = len(self._slots), shape.depth
        if not depth:
            return Round(Tokens(batch_size, batch_size), [0] * batch_size, [])
        index = torch.randint(QUANTILES, (batch_size, depth), generator=self._generator)
        probs = self._table.gather(1, index)
        noise = NOISE * torch.randn(probs.shape, generator=self._generator)
        values.features[:, :depth] = features_of((probs.logit() + noise).sigmoid())
        num_rows, num_drafts = shape.num_rows(batch_size), torch.full_like(self._slots, depth)
        chosen = choose_rows.reference(values, num_drafts, self._slots, shape.window, num_rows)
        run = (torch.rand(probs.shape, generator=self._generator) < probs).cumprod(1).sum(1)
        num_accepted = torch.minimum(run, chosen.num_verified)
        learn_values.reference(values, chosen.num_verified, self._slots, 1 + num_accepted)
        paths = probs.cumprod(1)
        is_verified = torch.arange(depth) < chosen.num_verified.unsqueeze(1)
        best = paths.flatten().sort(descending=True).values[: num_rows - batch_size]
        tokens = batch_size + float((paths * is_verified).sum()), batch_size + float(best.sum())
        return self._played(Tokens(*tokens), num_accepted, chosen, shape)

    def _played(
        self, tokens: Tokens, num_accepted: torch.Tensor, chosen: ChosenRows, shape: DraftShape
    ) -> Round:
        expected = chosen.expected.sum(0) / EXPECTED_SCALE if shape.is_ragged else torch.empty(0)
        return Round(tokens, num_accepted.tolist(), expected.tolist())


@cache
def _measured_ms(batch_size: int) -> dict[int, float]:
    """Rounds of chains by length, of `python -m benchmarks.adaptive lengths`."""
    rows = load("adaptive")["lengths"]["rows"]
    row = next(row for row in rows if row["batch_size"] == batch_size)
    return {int(length): ms for length, ms in row["static_ms"].items()}


def round_ms(shape: DraftShape, batch_size: int) -> float:
    """A straight line between the measured numbers of rows, and a time for each draft step."""
    step = DRAFT_MS + DRAFT_MS_PER_ROW * batch_size
    points = [(batch_size * (1 + n), ms - n * step) for n, ms in _measured_ms(batch_size).items()]
    num_rows, right = shape.num_rows(batch_size), 1
    while right + 1 < len(points) and points[right][0] < num_rows:
        right += 1
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0) + shape.depth * step
