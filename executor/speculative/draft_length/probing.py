"""Trying a longer draft length for a few rounds, to learn what is not being played: how often, and
for how long.

It knows budgets and what probes' rounds brought; which length would be worth a try is the cost
model's to say."""

from dataclasses import dataclass

from tllm_spec.adaptive_config import CostModelOptions

MAX_SAVED_PROBES = 2  # of the longest kind: credit that quiet times may save up
MAX_SAVED_TIME = (
    40  # rounds: what probes may add at once, e.g. five rounds of nine times the length
)
# Of the rounds that left a draft model something to read: what that is charged at most. A model
# with an eighth of the target's arithmetic takes less wherever memory counts, too; a longer return
# was a hiccup of the machine's.
MAX_RETURN_SHARE = 0.1
SPARE_ROUNDS = (
    3  # of a probe: the first finds no drafts of its length, and what is in flight is seen late
)
MAX_PAUSES = 16  # a pause in first ones; behind it only credit counts
ROUNDS_IN_VAIN = 2  # of a probe that ends with the first draft it sees


@dataclass
class Probe:
    """`gain`: tokens a request that it has won so far beyond what its time would have brought
    without it."""

    steps: int
    rounds_to_see: int  # that had drafts of this length and won nothing by them
    rounds_left: int  # of any kind, but for those that won
    rounds_to_win: int = (
        32  # a length that is better shows it in so many, one that is as good never
    )
    gain: float = 0.0


class Prober:
    """Credit in rounds and in seconds is earned by every round that is no probe and spent by those
    that win nothing. A probe in vain is followed by a pause, each next one twice as long, so that
    what was saved up is spread over the time in which a change is likeliest to be found."""

    def __init__(self, options: CostModelOptions) -> None:
        self._options = options
        self.probe: Probe | None = None
        self.rounds, self.seconds = 0.0, 0.0  # credit
        self._num_unread = 0  # rounds since the draft model has last read what they left
        # Taken out of the options, whose attributes are slow to read (pydantic): each is needed in
        # nearly every round.
        self._round_share, self._time_share = options.probe_round_share, options.probe_time_share
        self._max_rounds = MAX_SAVED_PROBES * (options.probe_rounds + 1)
        self._pause = self._pause_left = options.probe_pause

    def can_start(self, extra_seconds: float) -> bool:
        """Whether the rounds of a probe in vain are paid for, and their time, each taking so much
        longer than what is played; one that wins pays for itself."""
        is_due = self._pause_left <= 0 and self.rounds >= ROUNDS_IN_VAIN
        return is_due and self.seconds >= ROUNDS_IN_VAIN * extra_seconds

    def start(self, steps: int, rounds_to_see: int) -> None:
        self.probe = Probe(steps, rounds_to_see, rounds_to_see + SPARE_ROUNDS)

    def forget_pauses(self) -> None:
        """Another length is played: what was in vain before says little."""
        self._pause = self._pause_left = self._options.probe_pause

    def earn(self, seconds: float, steps: int) -> None:
        """A round that was no probe, with drafts of `steps`."""
        self._pause_left -= 1
        self._num_unread = 0 if steps else self._num_unread + 1
        if self.rounds < self._max_rounds:
            self.rounds += self._round_share
        if self.seconds < MAX_SAVED_TIME * seconds:
            self.seconds += self._time_share * seconds

    def book(
        self, probe: Probe, is_seen: bool, gain: float, extra_seconds: float, is_in_vain: bool
    ) -> None:
        """A round of a probe. `gain`: tokens a request more than in the same time without it.
        `is_in_vain`: drafts were accepted as far as the length that is played, and none beyond."""
        if is_seen:
            probe.gain += gain
        if is_seen and gain >= 0:
            probe.rounds_to_win -= 1
        else:
            self.rounds -= 1
            self.seconds -= extra_seconds
            probe.rounds_left -= 1
            probe.rounds_to_see -= is_seen
        is_lost = is_seen and is_in_vain and probe.gain < 0
        if is_lost or not (probe.rounds_to_win and probe.rounds_left and probe.rounds_to_see):
            self.end()

    def pay(self, seconds: float, a_round: float) -> None:
        """What a draft model had to read before the probe; told before the first round is booked.
        a_round: seconds of a plain one."""
        self.seconds -= min(seconds, MAX_RETURN_SHARE * self._num_unread * a_round)
        self._num_unread = 0

    def end(self) -> None:
        """It has seen enough, and did not convince."""
        self.probe = None
        self._pause_left = self._pause
        self._pause = min(2 * self._pause, MAX_PAUSES * self._options.probe_pause)
