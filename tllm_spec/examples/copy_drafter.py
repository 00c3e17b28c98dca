"""An example of a user-provided drafter (yaml_examples/user_provided.yaml): it copies what followed
the last few tokens before. It shows the whole interface. For real use, NGram does the same on the
device."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class LastSeen(ResourceManager):
    """State of a drafter. `free_resources` is called when a request ends, however it ends."""

    def __init__(self) -> None:
        self.match_of: dict[int, int] = {}  # request id -> where the last match ended

    def free_resources(self, request: LlmRequest) -> None:
        self.match_of.pop(request.request_id, None)


class CopyDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the last `size` tokens."""

    needed_manager = LastSeen

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.size = size

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        assert isinstance(resource_manager, LastSeen)
        for request in scheduled_requests.generation_requests:
            last_match = resource_manager.match_of.get(request.request_id, 0)
            end = self._find(request.tokens, last_match)
            resource_manager.match_of[request.request_id] = end
            following = request.tokens[end : end + request.num_drafts_wanted]
            request.py_draft_tokens = following if end else []

    def _find(self, tokens: list[int], last_match: int) -> int:
        """The end of the latest earlier occurrence of the last `size` tokens, 0 if there is none. A
        copy usually goes on, so the positions after the last match are tried first."""
        suffix = tokens[-self.size :]
        nearby = range(last_match, min(last_match + 8, len(tokens)))
        backwards = range(len(tokens) - 1, self.size - 1, -1)
        for ends in (nearby, backwards):
            for end in ends:
                if end >= self.size and tokens[end - self.size : end] == suffix:
                    return end
        return 0
