"""`ForcedRounds` of an engine that chooses between chains and trees. Which child of a node is
accepted, and the draft network's probabilities, follow a script: so trees have the nodes that are
likeliest under it, as those of a trained network have."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.forced_rounds import ForcedRounds
from benchmarks.harness.tree_simulator import by_rank
from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.expected_path import expected_accepted
from tllm_spec.executor.speculative.drafting import tree_drafting


@dataclass(frozen=True)
class Profile:
    """Acceptance of the best child of a node: `first` at the root, and at each further depth that
    of the depth before times `fall`. `by_rank` gives the other children's."""

    first: float
    fall: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.first}" if self.fall == 1 else f"{self.first}, x {self.fall} a depth"

    def rates(self, depth: int, topk: int) -> list[tuple[float, ...]]:
        """By depth, then by rank."""
        return [by_rank(self.first * self.fall**level, topk) for level in range(depth)]

    def expected(self, shape: DraftShape) -> float:
        """Tokens of a request's round."""
        return 1 + expected_accepted(shape, self.rates(max(shape.depth, 1), shape.topk))


class ForcedTreeRounds(ForcedRounds):
    """The options must have `adaptive`, a dynamic tree, and `synthetic_acceptance_rates` for it.
    script `[D, K]` float32: of `scripted_candidates`, inside which it is built and played."""

    def __init__(self, model: str, script: torch.Tensor, **options: Any) -> None:
        super().__init__(model, **options)
        self._script = script

    @property
    def shapes(self) -> DraftShapes:
        return self.executor.parts.slots.shapes

    def set_profile(self, profile: Profile) -> None:
        rates = profile.rates(*self._script.shape)
        self._script.copy_(torch.tensor(rates))
        synthetic = self.executor.parts.sampler._tree_synthetic
        assert synthetic is not None
        bounds = [list(accumulate(row)) for row in rates]
        synthetic.bounds.copy_(torch.tensor(bounds, dtype=synthetic.bounds.dtype))
        tiers = range(self.shapes.tree_tiers.stop)
        self._expected_tokens = [profile.expected(self.shapes.of(tier)) for tier in tiers]


@contextmanager
def scripted_candidates(script: torch.Tensor) -> Iterator[None]:
    """Inside the block, candidates after d drafts have the probabilities `script[d]`, best first.
    Graphs read the tensor when they are replayed."""
    growth, original = tree_drafting._Growth, tree_drafting._Growth.candidates

    def candidates(self: Any, step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs, tokens = original(self, step, state)
        return script[step, : probs.shape[1]].expand_as(probs).contiguous(), tokens

    with mock.patch.object(growth, "candidates", candidates):
        yield
