"""The interface of what requests occupy: slots, KV pages, drafter pools, a user's resources."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest


class ResourceManager:
    """What requests hold while they run, such as slots or pages. Called in every round, in the
    order of the executor's list. Every method has a default, so a user's manager overrides only
    what it needs."""

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """After scheduling, before drafting: make room for this round's tokens, placeholder drafts
        included."""

    def update_resources(self, batch: ScheduledBatch) -> None:
        """After the round was read: free what rejected drafts occupied, which is everything after
        a request's first `kv_len` tokens."""

    def free_resources(self, request: LlmRequest) -> None:
        """The request is finished, cancelled, failed or preempted; it may never have been
        prepared."""

    def check_integrity(self) -> None:
        """Raises AssertionError when a conservation law is broken."""
