"""An example of a user-provided drafter (yaml_examples/user_provided.yaml): copies what stood
behind the last few tokens before. It shows the whole interface; for real use NGram does the same
with an index."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class LastSeen(ResourceManager):
    """State beside a drafter: it is told when a request ends, whatever ended it."""

    def __init__(self) -> None:
        self.match_of: dict[int, int] = {}  # request id -> where the last match ended

    def free_resources(self, request: LlmRequest) -> None:
        self.match_of.pop(request.request_id, None)


class CopyDrafter(Drafter):
    """Proposes the continuation of the latest earlier place with the same `size` tokens."""

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        if not isinstance(resource_manager, LastSeen):
            raise ValueError(
                f"CopyDrafter needs resource_manager: {__name__}:LastSeen, not {resource_manager!r}"
            )
        for request in scheduled_requests.generation_requests:
            place = self._find(request.tokens, resource_manager.match_of.get(request.request_id, 0))
            resource_manager.match_of[request.request_id] = place
            request.py_draft_tokens = (
                request.tokens[place : place + request.num_drafts_wanted] if place else []
            )

    def _find(self, tokens: list[int], hint: int) -> int:
        """The place behind the latest earlier occurrence of the last `size` tokens, 0 if there is
        none. A copy usually goes on where it was (`hint`), so that is looked at first."""
        suffix = tokens[-self.size :]
        nearby, backwards = (
            range(hint, min(hint + 8, len(tokens))),
            range(len(tokens) - 1, self.size - 1, -1),
        )
        for places in (nearby, backwards):
            for place in places:
                if place >= self.size and tokens[place - self.size : place] == suffix:
                    return place
        return 0
