"""What drafts have really won or lost against plain decoding. It knows no estimates and decides
nothing."""

from collections.abc import Sequence

from tllm_spec.adaptive_config import CostModelOptions


class DraftAccount:
    """In the time of plain rounds, of as many requests as a probe should see; larger batches count
    for more. Losses are kept until they are won back, winnings up to `plain_after_win`: drafts that
    estimates, too, find worse than none go on no longer than it takes to lose those and
    `plain_after_loss`."""

    def __init__(self, options: CostModelOptions) -> None:
        self._max_lost, self._max_won = options.plain_after_loss, options.plain_after_win
        self._probe_trials = options.probe_trials
        self.lost = 0.0  # below 0: won

    def book(self, num_accepted: Sequence[int], num_requests: int, relative_time: float) -> None:
        """A round with drafts that took `relative_time` plain rounds; `num_accepted` of those that
        were drafted for."""
        lost = relative_time - 1 - sum(num_accepted) / num_requests
        if num_requests > self._probe_trials:
            lost *= num_requests / self._probe_trials
        self.lost += lost
        if self.lost < -self._max_won:
            self.lost = -self._max_won

    @property
    def is_used_up(self) -> bool:
        return self.lost >= self._max_lost
