"""When drafting is faster: the throughput equation of chain drafts that are each accepted with the
same probability. Times are arguments; other modules measure them. n = (1 - a^(K+1)) / (1 - a)
tokens a round, t = K t_draft + t_target."""

from dataclasses import dataclass

USUAL_PAIRS = (
    (0.3, 2),
    (0.5, 3),
    (0.7, 4),
    (0.85, 5),
)  # (acceptance, draft length): weak to strong drafters


def expected_tokens(acceptance: float, draft_len: int) -> float:
    """Tokens of a round, the target's own included. Raises ValueError outside 0..1 and below 0."""
    if not 0 <= acceptance <= 1 or draft_len < 0:
        raise ValueError(
            f"acceptance = {acceptance} and draft_len = {draft_len}: accepted are 0..1 and "
            "integers of 0 or more"
        )
    if acceptance == 1:
        return draft_len + 1.0
    return float((1 - acceptance ** (draft_len + 1)) / (1 - acceptance))


@dataclass(frozen=True)
class BreakEven:
    """Seconds of one draft, of the target's pass over a window of K + 1 tokens, and of a plain
    round."""

    draft_time: float
    target_time: float
    plain_time: float

    def speedup(self, acceptance: float, draft_len: int) -> float:
        """Tokens per second with drafts / without."""
        round_time = draft_len * self.draft_time + self.target_time
        return expected_tokens(acceptance, draft_len) * self.plain_time / round_time

    def least_acceptance(self, draft_len: int) -> float | None:
        """The acceptance from which drafting is not slower than plain decoding; None if even 1 is
        not enough."""
        if self.speedup(1.0, draft_len) < 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(
            50
        ):  # halving finds it to the last digit: the speedup rises with the acceptance
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle, draft_len) >= 1 else (middle, high)
        return high
