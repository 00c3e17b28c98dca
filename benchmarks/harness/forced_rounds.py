"""An engine whose draft length and acceptance the caller changes between blocks of rounds. The
engine, its graphs and its requests stay the same."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from benchmarks.harness.engine import Rounds
from benchmarks.harness.scripted_acceptance import script_acceptance
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

CHECKED_ROUNDS = 8  # rounds between two checks of the requests' room


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

    def observe(
        self,
        batch_size: int,
        num_accepted: Sequence[int],
        num_steps: int,
        *times: float | None,
        num_requests: int,
        **more: Any,
    ) -> bool:
        self.count(num_requests, num_steps)
        self.block.counted += num_requests + sum(num_accepted)
        return self._inner.observe(
            batch_size, num_accepted, num_steps, *times, num_requests=num_requests, **more
        )

    def count(self, num_requests: int, num_steps: int, rounds: int = 1) -> None:
        self.block.rounds_by_draft_len[num_steps] += rounds
        self.block.tokens += rounds * num_requests * self._expected_tokens[num_steps]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ForcedRounds(Rounds):
    """With a drafter, the options must have `synthetic_acceptance_rates` with any values."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._plain = AdaptiveController.fixed(0)
        self._expected_tokens = [1.0] * (1 + self.built.max_draft_len)
        self._filled_with = (0, 0)

    def set_acceptance(self, acceptance: float) -> None:
        """Of every draft, given that those before it were accepted."""
        rates = script_acceptance(self.executor, acceptance)
        self._expected_tokens = list(accumulate(rates, initial=1.0))

    def start(self, batch_size: int, prompt_len: int) -> None:
        """Runs without drafts, and no controller observes it."""
        self._filled_with = (batch_size, prompt_len)
        parts = self.executor.parts
        parts.controller, parts.draft_len_for = self._plain, self._plain.steps_for
        super().start(batch_size, prompt_len)

    def has_room(self, rounds: float) -> bool:
        """Whether every request can go on for so many rounds if all drafts are accepted."""
        longest = max(request.num_tokens for request in self.requests)
        return longest + (rounds + 4) * (1 + self.built.max_draft_len) < self.built.max_seq_len

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
            if not self.built.max_draft_len:  # plain decoding has no controller that observes
                counting.count(len(self.requests), 0, number)
        return block

    def _enter(self, controller: AdaptiveController, block: Block) -> Counting:
        parts, counting = self.executor.parts, Counting(controller, self._expected_tokens)
        parts.draft_len_for = controller.steps_for
        self.executor.step()
        parts.controller = counting
        self.executor.step()
        counting.block = block
        return counting
