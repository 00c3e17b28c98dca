"""What a round showed about its drafts, gathered request by request while the host reads it, for
the controller.

A request that had ended before its results were read (with overlap) shows nothing: what it drafted
lay behind its end."""

from dataclasses import dataclass, field

from tllm_spec.executor.rounds.launched_round import LaunchedRound
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController


@dataclass
class SeenRound:
    seconds: float | None
    num_accepted: list[int] = field(
        default_factory=list
    )  # of every request that drafts were wanted for
    num_drafted: int = 0  # really proposed for those
    num_requests: int = 0  # generating ones that had not ended before
    num_tokens: int = 0  # that these were given

    def tell(self, controller: AdaptiveController, launched: LaunchedRound) -> None:
        """A time counts for the draft length that all of the round had: its windows and the drafts
        in them. What a round took that a draft model began with reading in counts for itself."""
        batch = launched.batch
        has_time = not batch.context_requests
        is_pure = has_time and batch.draft_len == launched.num_steps and not batch.catches_up
        controller.observe(
            len(batch.generation_requests),
            self.num_accepted,
            launched.num_steps,
            self.seconds if is_pure else None,
            num_requests=self.num_requests,
            num_drafted=self.num_drafted,
            num_asked=launched.num_asked,
            sampled=batch.is_sampled,
            return_seconds=self.seconds if has_time and batch.catches_up else None,
        )
