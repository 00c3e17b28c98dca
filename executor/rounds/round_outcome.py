"""What a round showed about its drafts, collected while the host reads it, for the draft-length
controller. A request that had ended before its results were read (overlap) shows nothing."""

from dataclasses import dataclass, field

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound


@dataclass
class RoundOutcome:
    """Filled by `RoundReader`. seconds: None if the round has no comparable time."""

    seconds: float | None
    # One number for every request that wanted drafts.
    num_accepted: list[int] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)  # of the same; see `path_ranks`
    num_drafted: int = 0  # drafts of the same, of all together
    # Accepted drafts of the whole batch that each budget of rows was expected to bring; 0: unknown.
    expected: list[float] = field(default_factory=list)
    num_requests: int = 0  # generating ones that had not ended before
    num_tokens: int = 0  # that these were given

    def report_to(self, controller: AdaptiveController, batch: ScheduledBatch) -> None:
        """The time counts only if the whole round belongs to one draft length: no context chunks,
        drafts made and verified of the same length, and no catching up of a draft model."""
        is_pure = batch.draft_len == batch.made_draft_len and not batch.is_transition
        is_pure = is_pure and not batch.catches_up
        has_time = is_pure and not batch.context_requests
        observed = ObservedRound(
            len(batch.generation_requests),
            self.num_accepted,
            batch.made_draft_len if batch.verified_tier is None else batch.verified_tier,
            self.seconds if has_time else None,
            num_requests=self.num_requests,
            num_drafted=self.num_drafted,
            asked_draft_len=batch.asked_draft_len,
            ranks=self.ranks,
            expected=self.expected,
            context_len=batch.context_len,
        )
        controller.observe(observed)
