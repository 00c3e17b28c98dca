"""The interface of everything that makes draft tokens between scheduling and the target's forward.

A drafter of your own subclasses `Drafter` and is given to `UserProvidedDecodingConfig`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.interface import ResourceManager


class Drafter(ABC):
    """Proposes tokens; it cannot change the text, only how fast it comes."""

    limits: Mapping[str, object] = MappingProxyType({})  # as given to the constructor
    # The class that the configured `resource_manager` must have; None: the drafter needs none.
    needed_manager: ClassVar[type[ResourceManager] | None] = None
    # Whether the drafts of a round were made in the round before.
    drafts_ahead: ClassVar[bool] = False
    # Whether it drafts text that a grammar forces, once the tokens of the round before are read.
    knows_forced_text: bool = False

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: Mapping[int, int] | None = None,
    ) -> None:
        """A subclass need not call it. The arguments are TensorRT-LLM's: what is given must be what
        `UserProvidedDecodingConfig` says, which decides."""
        self.limits = {
            "max_draft_len": max_draft_len,
            "max_total_draft_tokens": max_total_draft_tokens,
            "max_concurrency": max_concurrency,
            "draft_len_schedule": draft_len_schedule,
        }

    @abstractmethod
    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        """Sets `py_draft_tokens` of every request in `scheduled_requests.generation_requests`.

        On entry the list holds placeholders; replace it by 0 to `request.num_drafts_wanted` token
        ids that may follow `request.tokens` (prompt and output so far; read it, do not change it).
        More than are wanted, up to `max_draft_len`, are cut off. An exception, more tokens than
        that or an id outside the vocabulary fails that request with a message, and no other.

        With more `max_total_draft_tokens` than `max_draft_len` the drafts may be a tree: a list of
        paths, `[[5, 6], [5, 8], [9]]`, or a list of tokens, parents before children, with
        `request.py_draft_parents`: for each the number of the token before it, counted from 1, and
        0 for the last token of `request.tokens`. `num_drafts_wanted` is then the longest path.
        The children of a node must differ; equal beginnings of paths become one.

        `resource_manager` is the one that was configured with the drafter."""


class NoDrafter(Drafter):
    """Plain decoding: the loop has no branch for it."""

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        assert scheduled_requests.draft_len == 0, "drafts were scheduled without a drafter"
