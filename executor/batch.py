"""What one round of the executor works on, and what comes out of it."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.request import LlmRequest


@dataclass
class ScheduledBatch:
    """The requests of one round. In every tensor of the round context rows come first, then the
    generation windows `[bonus token, draft 1 ... draft K]`."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    # Those of the context requests that were given a slot in this round.
    joining: list[LlmRequest] = field(default_factory=list)
    # The drafts in every generation window of this round have this shape, padding included.
    shape: DraftShape = NO_DRAFTS
    # Whether a request that takes no drafts has one row in the forward instead of a whole window.
    is_ragged: bool = False
    # The longest draft made for these windows has this length; the rest of each one is padding.
    made_draft_len: int = 0
    # The drafter was asked for drafts of this length; it may have made shorter ones.
    asked_draft_len: int = 0
    # A drafter on the device makes drafts of this shape in this round for the next one.
    new_shape: DraftShape = NO_DRAFTS
    # Where rounds choose between chains and trees: the lower of the tiers of these windows and of
    # the drafts in them, and whether they differ.
    verified_tier: int | None = None
    is_transition: bool = False
    cuts_copies: bool = False  # copied drafts are verified in windows that are too short for them
    # Average tokens of the requests that the shape was chosen for, if the choice depends on it.
    context_len: int = 0
    # Whether the round began with a draft model's reading of tokens that it had missed.
    catches_up: bool = False

    @cached_property
    def last_chunk_requests(self) -> list[LlmRequest]:
        """Context requests whose first new token is sampled in this round. Valid from scheduling
        on, also when the requests have moved on."""
        return [request for request in self.context_requests if request.is_last_context_chunk]

    @property
    def drafts_after_contexts(self) -> bool:
        """Whether one of `last_chunk_requests` wants drafts and does not end with its first
        token."""
        return any(
            request.draft_limit and request.num_output_tokens + 1 < request.max_tokens
            for request in self.last_chunk_requests
        )

    @property
    def row_counts(self) -> list[int] | None:
        """Rows of each generating request in the forward; None: whole windows, or the device
        chooses."""
        window = self.shape.window
        if not self.is_ragged or window == 1 or self.shape.is_ragged:
            return None
        return [window if request.draft_limit else 1 for request in self.generation_requests]

    @property
    def num_window_rows(self) -> int:
        """Rows of all generating requests in the forward."""
        counts = self.row_counts
        return self.shape.num_rows(len(self.generation_requests)) if counts is None else sum(counts)

    @property
    def max_kv_len(self) -> int:
        """Upper bound of the KV lengths after the round's windows. There must be a window."""
        longest = max(request.num_tokens_bound for request in self.generation_requests)
        return longest + self.shape.num_nodes

    def drop_finished(self) -> None:
        """Leaves out generating requests that have ended since they were scheduled."""
        left = [request for request in self.generation_requests if not request.is_finished]
        if len(left) < len(self.generation_requests):
            self.generation_requests = left
            self.shape = self.shape if left else NO_DRAFTS

    def __bool__(self) -> bool:
        return bool(self.context_requests or self.generation_requests)

    def requests(self) -> list[LlmRequest]:
        return self.context_requests + self.generation_requests


@dataclass(frozen=True)
class SampledTokens:
    """Device results of N requests.

    `new_tokens` `[N, D+1]` int64, for drafts of depth D, holds the emitted run at the front of each
    row; `new_lens` `[N]` int64 is how many are valid (accepted drafts + 1). A token of -1 says that
    the logits of that position were not numbers. `rows` `[N, D+1]`: for trees, the window rows that
    these tokens come after. `ranks` `[N, D+1]`: see `path_ranks`. `num_drafts` `[N, 1 + C]`: how
    many drafts there really were, and then what C budgets of rows were expected to bring
    (`ChosenRows`, 0: not known); None: the host knows the number. `to_host`:
    their `table`, if it is on its way already."""

    new_tokens: torch.Tensor
    new_lens: torch.Tensor
    rows: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    num_drafts: torch.Tensor | None = None
    to_host: ToHost | None = None

    def table(self) -> torch.Tensor:
        """`[N, 1 + num_columns]`: lengths, then `columns`."""
        return torch.cat((self.new_lens.unsqueeze(1), self.columns()), dim=1)

    def columns(self) -> torch.Tensor:
        """Tokens, then the number of drafts, then ranks."""
        further = [each for each in (self.num_drafts, self.ranks) if each is not None]
        return torch.cat((self.new_tokens, *further), dim=1) if further else self.new_tokens

    @property
    def num_columns(self) -> int:
        all_columns = self.new_tokens, self.num_drafts, self.ranks
        return sum(each.shape[1] for each in all_columns if each is not None)
