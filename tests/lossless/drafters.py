"""User-provided drafters that know the right text and propose right, wrong, too few and no tokens
by turns."""

from itertools import chain

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter

# By the number of output tokens modulo 6: how many right tokens are proposed, then how many wrong
# ones.
TURNS = ((9, 0), (1, 9), (0, 9), (2, 0), (0, 0), (2, 1))


class AdversarialDrafter(Drafter):
    """Drafts from the known texts, by the turn of the request."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], vocab_size: int = 2048) -> None:
        self._texts, self._vocab_size = texts, vocab_size  # prompt -> output

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            num_right, num_wrong = TURNS[request.num_output_tokens % len(TURNS)]
            text = self._texts[tuple(request.tokens[: request.prompt_len])]
            rest = text[request.num_output_tokens :]
            drafts = rest[:num_right] + [
                (token + 1) % self._vocab_size for token in rest[num_right : num_right + num_wrong]
            ]
            if drafts:  # else the placeholders stay as they are: nothing to propose
                self._set(request, drafts[: request.num_drafts_wanted])

    def _set(self, request: LlmRequest, drafts: list[int]) -> None:
        request.py_draft_tokens = drafts


class AdversarialTreeDrafter(AdversarialDrafter):
    """A wrong token before each draft as its sibling. By turns it gives paths, tokens with parents,
    and chains."""

    def _set(self, request: LlmRequest, drafts: list[int]) -> None:
        if request.num_output_tokens % 5 == 0:
            request.py_draft_tokens = drafts
            return
        wrong = [(token + 7) % self._vocab_size for token in drafts]
        if request.num_output_tokens % 2:
            paths = [[*drafts[:i], wrong[i]] for i in range(len(drafts))]
            request.py_draft_tokens = [*paths, drafts]  # type: ignore[list-item] # a list of paths
            return
        # Node 2n is the n-th draft.
        request.py_draft_tokens = list(chain.from_iterable(zip(wrong, drafts, strict=True)))
        request.py_draft_parents = [2 * (i // 2) for i in range(2 * len(drafts))]


def expected_rounds(output_len: int, draft_len: int) -> tuple[int, int, int]:
    """Rounds, drafted and accepted tokens of a request that is never disturbed. Its first token
    comes from the context."""
    rounds = drafted = accepted = 0
    position = 1
    while position < output_len:
        num_right, num_wrong = TURNS[position % len(TURNS)]
        wanted = min(draft_len, output_len - position - 1)
        rounds += 1
        drafted += min(wanted, num_right + num_wrong)
        accepted += min(wanted, num_right)
        position += 1 + min(wanted, num_right)
    return rounds, drafted, accepted
