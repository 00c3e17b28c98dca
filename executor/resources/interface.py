"""The contract of everything that requests occupy: slots, KV pages, drafter pools, user-provided
resources."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest


class ResourceManager:
    """Follows requests through a round. Managers are called in the order in which the executor
    holds them.

    Every method has a default, so that a user's manager writes only what it needs.
    """

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """After scheduling, before drafting: make room for this round's tokens, placeholder drafts
        included."""

    def update_resources(self, batch: ScheduledBatch) -> None:
        """After the round was read: give back what rejected drafts took. A request's `kv_len`
        says how far its final tokens reach."""

    def free_resources(self, request: LlmRequest) -> None:
        """The request is finished, cancelled, failed or preempted; it may never have been
        prepared."""

    def check_integrity(self) -> None:
        """Raises AssertionError when a conservation law is broken."""
