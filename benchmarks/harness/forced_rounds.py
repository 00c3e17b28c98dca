"""An engine whose draft length or tree, and whose acceptance, the caller changes between blocks of
rounds. The engine, its graphs and its requests stay the same. Its text means nothing."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any
from unittest import mock

import torch

from benchmarks.harness.engine import Rounds
from tllm_spec.config.draft_shape import DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import expected_accepted
from tllm_spec.executor.speculative.drafting import drafting_steps as tree_drafting
from tllm_spec.executor.speculative.drafting.suffix_match import SuffixMatch
from tllm_spec.kernels.drafts.suffix_match import Matches

CHECKED_ROUNDS = 8  # rounds between two checks of the requests' room


# Acceptance of each further child of a node, given that those before it were rejected.
NEXT_RANKS = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08)


@cache
def by_rank(first: float, topk: int) -> tuple[float, ...]:
    """The probability of each child of a node. first: of its first."""
    found, left = [first], 1 - first
    for share in NEXT_RANKS[: topk - 1]:
        found.append(left * share)
        left *= 1 - share
    return tuple(found)


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
        """The probabilities by depth, then by rank."""
        return [by_rank(self.first * self.fall**level, topk) for level in range(depth)]

    def expected(self, shape: DraftShape) -> float:
        """Tokens of a request's round."""
        return 1 + expected_accepted(shape, self.rates(max(shape.depth, 1), shape.topk))


@dataclass
class Block:
    """Consecutive rounds. `tokens`: expected at the true acceptance from the drafts that were
    verified, so that chance does not blur a comparison. `counted`: tokens that came out."""

    seconds: float = 0.0
    tokens: float = 0.0
    counted: int = 0
    rounds_by_draft_len: Counter[int] = field(default_factory=Counter)

    @property
    def rounds(self) -> int:
        return sum(self.rounds_by_draft_len.values())

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def round_ms(self) -> float:
        return self.seconds / self.rounds * 1e3

    def __iadd__(self, other: "Block") -> "Block":
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.counted += other.counted
        self.rounds_by_draft_len += other.rounds_by_draft_len
        return self


class Counting:
    """A controller that passes everything on to another and counts the rounds into `block`.

    `expected_tokens`: of a request's round, by draft length."""

    def __init__(self, inner: AdaptiveController, expected_tokens: Sequence[float]) -> None:
        self._inner, self._expected_tokens = inner, expected_tokens
        self.block = Block()

    def observe(self, observed: ObservedRound) -> bool:
        assert observed.verified_tier is not None
        self.count(observed.num_alive, observed.verified_tier)
        self.block.counted += observed.num_alive + sum(observed.num_accepted)
        return self._inner.observe(observed)

    def count(self, num_requests: int, verified_tier: int, rounds: int = 1) -> None:
        self.block.rounds_by_draft_len[verified_tier] += rounds
        self.block.tokens += rounds * num_requests * self._expected_tokens[verified_tier]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ForcedRounds(Rounds):
    """With a drafter, the options must have `synthetic_acceptance_rates` with any values.

    script `[D, K]` float32, for dynamic trees: that of `scripted_candidates`, inside which the
    engine is built and played."""

    def __init__(self, model: str, script: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._script = script
        self._plain = AdaptiveController.fixed(0)
        self._expected_tokens = [1.0] * (1 + self.built.limits.max_draft_len)
        self._filled_with = (0, 0)

    @property
    def shapes(self) -> DraftShapes:
        return self.executor.parts.slots.shapes

    def set_profile(self, profile: Profile) -> None:
        """Makes the engine accept drafts by chance. Graphs read the tensors written here."""
        sampler, longest = self.executor.parts.sampler, self.shapes.longest
        rates = profile.rates(longest.depth, longest.topk)
        if self._script is not None:
            self._script.copy_(torch.tensor(rates))
        synthetic = sampler._synthetic
        assert synthetic is not None
        bounds = torch.tensor([list(accumulate(each)) for each in rates])
        synthetic.bounds.copy_(bounds.to(synthetic.bounds.dtype))
        shapes = map(self.shapes.of, range(self.shapes.further_tiers.stop))
        # Texts have no matches.
        self._expected_tokens = [
            1.0 if shape.is_copied else profile.expected(shape) for shape in shapes
        ]

    def start(self, batch_size: int, prompt_len: int) -> None:
        """Runs without drafts, and no controller observes it."""
        self._filled_with = (batch_size, prompt_len)
        parts = self.executor.parts
        parts.controller, parts.tier_for = self._plain, self._plain.tier_for
        super().start(batch_size, prompt_len)

    def has_room(self, rounds: float) -> bool:
        """Whether every request can go on for so many rounds if all drafts are accepted."""
        longest = max(request.num_tokens for request in self.requests)
        limits = self.built.limits
        return longest + (rounds + 4) * (1 + limits.max_draft_len) < limits.max_seq_len

    def refill(self) -> None:
        """Replaces the requests by new ones, as `start` put them."""
        self.start(*self._filled_with)

    def play(
        self, controller: AdaptiveController, *, rounds: int | None = None, seconds: float = 0.0
    ) -> Block:
        """That many rounds, or rounds of that many seconds, under `controller`.

        Two rounds before them do not count: the first was launched under the previous controller,
        and the next may have too few drafts. Requests without room are replaced; that takes no
        time of the block."""
        block = Block()
        counting = self._enter(controller, block)
        while block.seconds < seconds if rounds is None else block.rounds < rounds:
            if not self.has_room(CHECKED_ROUNDS):
                self.refill()
                counting = self._enter(controller, block)
            left = CHECKED_ROUNDS if rounds is None else rounds - block.rounds
            number = min(CHECKED_ROUNDS, left)
            start = time.perf_counter()
            for _ in range(number):
                self.executor.step()
            block.seconds += time.perf_counter() - start
            # Plain decoding has no controller that observes.
            if not self.built.limits.max_draft_len:
                counting.count(len(self.requests), 0, number)
        return block

    def _enter(self, controller: AdaptiveController, block: Block) -> Counting:
        parts, counting = self.executor.parts, Counting(controller, self._expected_tokens)
        parts.tier_for = controller.tier_for
        self.executor.step()
        parts.controller = counting
        self.executor.step()
        counting.block = block
        return counting


@contextmanager
def scripted_candidates(script: torch.Tensor) -> Iterator[None]:
    """Inside the block, candidates after d drafts have the probabilities `script[d]`, best first:
    trees have the nodes that are likeliest under it, as those of a trained network have. Graphs
    read the tensor when they are replayed. And texts have no matches: random ones would have few,
    but drafts that are accepted by chance repeat themselves."""
    growth, original = tree_drafting._Growth, tree_drafting._Growth.candidates
    search = SuffixMatch.matches

    def candidates(self: Any, step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs, tokens = original(self, step, state)
        return script[step, : probs.shape[1]].expand_as(probs).contiguous(), tokens

    def matches(*args: Any) -> Matches:
        found = search(*args)
        none = torch.zeros_like(found.num_drafts), torch.zeros_like(found.lengths)
        return found._replace(num_drafts=none[0], lengths=none[1])

    with (
        mock.patch.object(growth, "candidates", candidates),
        mock.patch.object(SuffixMatch, "matches", matches),
    ):
        yield
