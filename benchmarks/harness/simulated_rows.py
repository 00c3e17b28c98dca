"""Rounds of requests that share rows, without an engine: what the choice of drafts reaches, and
what it would reach if it knew their true probabilities."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from benchmarks.harness.report import load
from benchmarks.harness.scripted_tokens import NOISE, QUANTILES, quantiles
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.kernels.choose_rows import DraftValues, choose_rows, features_of, learn_values

DRAFT_MS, DRAFT_MS_PER_REQUEST = 0.22, 0.001  # of a draft step; the rest of a round has its rows
WARM_UP_ROUNDS = 40


class Tokens(NamedTuple):
    """The mean tokens of a round of the whole batch."""

    reached: float
    oracle: float


class Simulation:
    """means: as `TokenScript.set_means`."""

    def __init__(self, batch_size: int, means: Sequence[float], seed: int = 0) -> None:
        rows = [quantiles(means[slot % len(means)]) for slot in range(batch_size)]
        self._table, self._slots = torch.stack(rows), torch.arange(batch_size)
        self._generator = torch.Generator().manual_seed(seed)

    def probs(self, depth: int) -> torch.Tensor:
        """Draws the drafts' probabilities, `[B, depth]`."""
        size = len(self._slots), depth
        index = torch.randint(QUANTILES, size, generator=self._generator)
        return self._table.gather(1, index)

    def play(self, shape: DraftShape, rounds: int) -> Tokens:
        """Rounds of this shape, after some that are not counted."""
        batch_size, depth = len(self._slots), shape.depth
        if not depth:
            return Tokens(batch_size, batch_size)
        values = DraftValues.of_slots(batch_size, depth, torch.device("cpu"))
        num_rows, all_drafts = shape.num_rows(batch_size), torch.full_like(self._slots, depth)
        reached = oracle = 0.0
        for number in range(WARM_UP_ROUNDS + rounds):
            probs = self.probs(depth)
            noise = NOISE * torch.randn(probs.shape, generator=self._generator)
            values.features.copy_(features_of((probs.logit() + noise).sigmoid()))
            chosen = choose_rows.reference(values, all_drafts, self._slots, 1 + depth, num_rows)
            coins = torch.rand(probs.shape, generator=self._generator) < probs
            run = coins.cumprod(1).sum(1)
            num_accepted = torch.minimum(run, chosen.num_verified)
            learn_values.reference(values, chosen.num_verified, self._slots, 1 + num_accepted)
            if number >= WARM_UP_ROUNDS:
                paths = probs.cumprod(1)
                is_verified = torch.arange(depth) < chosen.num_verified.unsqueeze(1)
                best = paths.flatten().sort(descending=True).values
                reached += float((paths * is_verified).sum())
                oracle += float(best[: num_rows - batch_size].sum())
        return Tokens(batch_size + reached / rounds, batch_size + oracle / rounds)


@cache
def _measured_ms(batch_size: int) -> dict[int, float]:
    """Rounds of chains by length, of `python -m benchmarks.adaptive lengths`."""
    rows = load("adaptive")["lengths"]["rows"]
    row = next(row for row in rows if row["batch_size"] == batch_size)
    return {int(length): ms for length, ms in row["static_ms"].items()}


def round_ms(shape: DraftShape, batch_size: int) -> float:
    """A straight line between the measured numbers of rows, and a time for each draft step."""
    step = DRAFT_MS + DRAFT_MS_PER_REQUEST * batch_size
    points = [(batch_size * (1 + n), ms - n * step) for n, ms in _measured_ms(batch_size).items()]
    num_rows, right = shape.num_rows(batch_size), 1
    while right + 1 < len(points) and points[right][0] < num_rows:
        right += 1
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0) + shape.depth * step
