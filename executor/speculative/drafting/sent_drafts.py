"""Drafts that the host knows: grammars improve them, and chains are sent to the slots."""

from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.kernels.slots.accept import Drafts

Draft = TypeVar("Draft")


def improve(
    requests: Sequence[LlmRequest],
    drafts: list[Draft],
    limits: Sequence[int],
    better: Callable[[GrammarState, Draft, int], Draft],
) -> None:
    """Replaces drafts of requests with grammars, which may know better ones, in place. limits: of
    each request's drafts."""
    for number, request in enumerate(requests):
        if request.grammar is not None and limits[number]:
            request.grammar.read(request.tokens, request.prompt_len)
            drafts[number] = better(request.grammar, drafts[number], limits[number])


def send_chains(
    slots: SlotState, requests: Sequence[LlmRequest], drafts: Sequence[list[int]], draft_len: int
) -> None:
    """Sends chains to the requests' next windows. Those that are shorter than `draft_len` are
    padded with the request's own last token: the forward reads it, and another token's embedding
    might be NaN."""
    rows: list[int] = []  # of slot, number of drafts, padded drafts
    for request, draft in zip(requests, drafts, strict=True):
        rows += (request.slot, len(draft))
        rows += draft
        rows += request.tokens[-1:] * (draft_len - len(draft))
    table = to_device(array("q", rows), slots.device).view(len(requests), -1)
    slot_ids, numbers = table[:, :2].t().contiguous()
    slots.write(slot_ids, Drafts(table[:, 2:].contiguous(), numbers))
