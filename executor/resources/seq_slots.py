"""Slots: the row that a running request owns in every device tensor of per-request state."""

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager


class SeqSlotManager(ResourceManager):
    """Hands out `max_batch_size` slots, lowest first. One more row, `dummy_slot`, is for padding
    requests."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.dummy_slot = max_batch_size
        self._free = list(range(max_batch_size - 1, -1, -1))
        self._owner: dict[int, int] = {}  # slot -> request id

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, request: LlmRequest) -> None:
        request.slot = self._free.pop()
        self._owner[request.slot] = request.request_id

    def free_resources(self, request: LlmRequest) -> None:
        if request.slot < 0:
            return
        assert self._owner.pop(request.slot) == request.request_id, (
            "a slot was freed by another request"
        )
        self._free.append(request.slot)
        request.slot = -1

    def check_integrity(self) -> None:
        assert len(self._free) + len(self._owner) == self.max_batch_size, (
            "slots: free + owned != total"
        )
        assert not set(self._free) & set(self._owner), "slots: a slot is both free and owned"
