"""Expected accepted drafts by tier: of chains from acceptance by position, of trees from acceptance
by depth and rank."""

from collections.abc import Sequence
from typing import Any

from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.speculative.draft_length.acceptance_estimate import AcceptanceEstimate
from tllm_spec.executor.speculative.draft_length.expected_path import expected_accepted
from tllm_spec.executor.speculative.draft_length.rank_estimate import (
    RankEstimate,
    by_rank,
    chain_counts,
    columns_of,
)
from tllm_spec.executor.speculative.draft_length.tier_policy import ObservedRound

REFRESH_ROUNDS = 8  # that predictions of trees may be old: they take long
GAIN_DRAFTS = 128.0  # accepted drafts that the assumption of no gain counts for
GAIN_WINDOWS = 4.0  # memory of the gain, which changes less than acceptance does
SETTLING_TRIALS = 64  # requests in trees before predictions are compared: priors are far off
FADING_ROUNDS = 256  # memory of the gain in rounds without trees, which are then tried again
MIN_GAIN, MAX_GAIN = 0.5, 2.0
MAX_WEIGHT = 0.125  # of a round


class TierEstimate:
    """Expected accepted drafts of every tier. `rates`: acceptance by position of first children.
    `expected`: accepted drafts by tier.

    A dynamic tree adapts to each token, and paths of later children go on worse. `gain` is what
    trees had accepted over what depth and rank alone predict."""

    def __init__(
        self, shapes: DraftShapes, ladder: Sequence[int], prior: float, window: float
    ) -> None:
        self._trees = {tier: shapes.of(tier) for tier in ladder if tier in shapes.tree_tiers}
        depth = max(shapes.of(tier).depth for tier in ladder)
        self._chains = AcceptanceEstimate(depth, prior, window)
        self.rates, self.expected = self._chains.rates, self._chains.expected_accepted
        self._window, self.gain = window, 1.0
        self._age = self._num_trials = 0
        self._seen = self._predicted = 0.0
        if self._trees:
            topk = max(tree.topk for tree in self._trees.values())
            self._ranks = RankEstimate(topk, window)
            self._predict()
            self._combine()

    def observe(self, observed: ObservedRound, tier: int) -> None:
        """tier: of the drafts that were verified."""
        num_requests, num_accepted, is_tree = (
            observed.num_requests,
            observed.num_accepted,
            tier in self._trees,
        )
        if not is_tree:
            self._seen -= self._seen / FADING_ROUNDS
            self._predicted -= self._predicted / FADING_ROUNDS
        if observed.ranks:
            columns = columns_of(observed.ranks)
            self._chains.observe_counts(num_requests, chain_counts(columns))
            if is_tree:
                self._ranks.observe(num_requests, columns)
                self._compare(tier, num_accepted)
        elif not is_tree:
            self._chains.observe(num_requests, num_accepted, tier)
        if self._trees:
            self._age += 1
            if self._age % REFRESH_ROUNDS == 0:
                self._predict()
            self._combine()

    def _compare(self, tier: int, num_accepted: Sequence[int]) -> None:
        self._num_trials += len(num_accepted)
        if self._num_trials <= SETTLING_TRIALS:
            return
        keep = 1 - min(len(num_accepted) / (GAIN_WINDOWS * self._window), MAX_WEIGHT)
        self._seen = keep * self._seen + sum(num_accepted)
        self._predicted = keep * self._predicted + len(num_accepted) * self._predictions[tier]

    def _predict(self) -> None:
        shares = self._ranks.shares
        rates = [by_rank(rate, shares) for rate in self.rates]
        self._predictions = {
            tier: expected_accepted(tree, rates) for tier, tree in self._trees.items()
        }

    def _combine(self) -> None:
        gain = (self._seen + GAIN_DRAFTS) / (self._predicted + GAIN_DRAFTS)
        self.gain = min(max(gain, MIN_GAIN), MAX_GAIN)
        chains = self._chains.expected_accepted
        self.expected = chains + [0.0] * (1 + max(self._trees) - len(chains))
        for tier, predicted in self._predictions.items():
            self.expected[tier] = self.gain * predicted

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"acceptance": [round(rate, 4) for rate in self.rates]}
        if self._trees:
            found["further_children"] = [round(share, 4) for share in self._ranks.shares[1:]]
            found["tree_gain"] = round(self.gain, 4)
        return found
