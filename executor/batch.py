"""What one round of the executor works on, and what comes out of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.device_span import DeviceSpan
from tllm_spec.executor.rounds.transfer import ToHost

_is_sampled = attrgetter("is_sampled")


@dataclass
class ScheduledBatch:
    """The requests of one round. In every tensor of the round context rows come first, then the
    generation windows."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    joining: list[LlmRequest] = field(
        default_factory=list
    )  # of the context requests, those with a new slot
    draft_len: int = 0  # drafts in every generation window of this round, padding included
    num_asked: int = (
        0  # drafts that the drafter is asked for, of some request at least; it may have fewer
    )
    draft_probs: torch.Tensor | None = (
        None  # [B, K, V] what drafts were drawn from, for rejection sampling
    )
    num_new_drafts: int = 0  # drafts that a drafter inside the forward makes for the next round
    catches_up: bool = (
        False  # it began with a draft model's reading what it had missed of generated tokens
    )

    @property
    def last_chunk_requests(self) -> list[LlmRequest]:
        """Context requests whose first new token is sampled in this round."""
        return [request for request in self.context_requests if request.is_last_context_chunk]

    @property
    def drafts_after_contexts(self) -> bool:
        """Whether any of them wants drafts, and does not end with its first token. Nobody else ever
        verifies one, even where some were made beside windows."""
        return any(
            request.draft_limit and request.num_output_tokens + 1 < request.max_tokens
            for request in self.last_chunk_requests
        )

    @property
    def is_sampled(self) -> bool:
        """Not all windows are of greedy requests."""
        return has_sampled(self.generation_requests)

    @property
    def window(self) -> int:
        return 1 + self.draft_len

    def __bool__(self) -> bool:
        return bool(self.context_requests or self.generation_requests)

    def requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests


def has_sampled(requests: Iterable[LlmRequest]) -> bool:
    """Whether not all of them are greedy."""
    return any(map(_is_sampled, requests))


@dataclass(frozen=True)
class SampledTokens:
    """Device results of N requests.

    `new_tokens` `[N, K+1]` int64 holds the emitted run at the front of each row; `new_lens` `[N]`
    int64 is how many are valid (accepted drafts + 1). A token of -1 says that the logits of that
    position were not numbers.
    `to_host`: their `side_by_side`, under way; None: nobody has sent it. `behind`: what the device
    does behind that."""

    new_tokens: torch.Tensor
    new_lens: torch.Tensor
    to_host: ToHost | None = None
    behind: DeviceSpan | None = None

    def side_by_side(self) -> torch.Tensor:
        """`[N, K+2]`: lengths, then tokens."""
        return torch.cat((self.new_lens.unsqueeze(1), self.new_tokens), dim=1)
