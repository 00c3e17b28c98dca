"""Drafts that the host sends to the slots, or knows to be there: those of the round before, and
better ones where a grammar forces text."""

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost, to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.kernels.slots.accept import Drafts

_num_ready, _slot = attrgetter("num_drafts_ready"), attrgetter("slot")
Own = TypeVar("Own")


def improve(
    requests: Sequence[LlmRequest],
    drafts: list[Own],
    limits: Sequence[int],
    better: Callable[[GrammarState, Own, int], Own],
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


def take_ready(
    batch: ScheduledBatch, slots: SlotState, *, knows_forced_text: bool, narrows: bool
) -> None:
    """Counts the drafts that the round before has left in the slots. The host knows how many a
    request may have, and reads no more, but for requests with grammars whose tokens it has read.
    knows_forced_text: False: their drafts stay as they are. narrows: windows become as long as the
    longest drafts, for which the device is waited for."""
    draft_len = batch.shape.depth
    longest = max(map(_num_ready, batch.generation_requests), default=0)
    batch.made_draft_len = batch.asked_draft_len = min(draft_len, longest)
    for request in batch.generation_requests:
        ready, limit = request.num_drafts_ready, request.draft_limit
        # `min` of three numbers would take longer than the rest of the loop, and most requests
        # have all drafts.
        request.py_num_draft_tokens = (
            draft_len if ready >= draft_len <= limit else min(ready, limit)
        )
    if knows_forced_text and draft_len:
        _improve_ready(batch, slots)
    if narrows and batch.made_draft_len and not batch.shape.is_ragged:
        _narrow(batch, slots)


def _improve_ready(batch: ScheduledBatch, slots: SlotState) -> None:
    """A tree is dropped where the grammar forces as many tokens as it is deep."""
    guided = [
        request
        for request in batch.generation_requests
        if request.grammar is not None
        and not request.tokens_in_flight
        and request.num_drafts_wanted
    ]
    if not guided:
        return
    slot_ids = _slot_ids(guided, slots)
    windows = slots.window[:, 1 : 1 + batch.shape.depth].index_select(0, slot_ids)
    sent = ToHost([windows, slots.num_real(slot_ids, batch.shape)])
    limits = [request.num_drafts_wanted for request in guided]
    tokens, numbers = (each.tolist() for each in sent.wait())
    numbers = list(map(min, numbers, limits))
    is_tree = batch.shape.is_tree
    drafts: list[list[int]] = [
        [] if is_tree else row[:number] for row, number in zip(tokens, numbers, strict=True)
    ]
    improve(guided, drafts, limits, GrammarState.better_drafts)
    better = [
        (request, draft)
        for request, draft, number in zip(guided, drafts, numbers, strict=True)
        if not is_tree or len(draft) >= max(number, 1)
    ]
    for request, draft in better:
        request.py_num_draft_tokens = len(draft)
        batch.made_draft_len = max(batch.made_draft_len, len(draft))
    if better:
        requests, chains = zip(*better, strict=True)
        send_chains(slots, requests, chains, batch.shape.depth)


def _narrow(batch: ScheduledBatch, slots: SlotState) -> None:
    slot_ids = _slot_ids(batch.generation_requests, slots)
    batch.made_draft_len = int(slots.num_real(slot_ids, batch.shape).max())
    narrow = slots.shapes.of(batch.made_draft_len)
    if narrow.num_nodes <= batch.shape.num_nodes:  # there are pages for no more
        batch.shape = narrow


def _slot_ids(requests: Sequence[LlmRequest], slots: SlotState) -> torch.Tensor:
    return to_device(list(map(_slot, requests)), slots.device)
