"""Masks of the tokens that requests' grammars allow, at every row of a round.

A window's row after drafts is masked as if these drafts were the text, so a draft is accepted only
where plain decoding would choose it. The drafts come to the host before the round's forward is
launched, and the masks are filled while it runs."""

from collections.abc import Sequence
from time import perf_counter

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.transfer import PinnedBuffers, ToHost, to_device
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.grammar_state import DraftNodes
from tllm_spec.kernels.token_mask import mask_tokens

# All requests wait meanwhile, so a request whose grammar takes longer fails.
MAX_FILL_SECONDS = 1.0


class GrammarMasks:
    """Costs nothing in a round without such requests."""

    def __init__(self, slots: SlotState, vocab_size: int) -> None:
        self._slots = slots
        self._num_words = -(-vocab_size // 32)
        self._buffers = PinnedBuffers()
        self._windows: ToHost | None = None
        self._index: dict[int, int] = {}  # of the round's windows, by request id
        self._culprit: LlmRequest | None = None
        self.limits_time = True

    def begin(self, batch: ScheduledBatch) -> None:
        """Before the forward of a round is launched, whose drafts are in the slots."""
        self._windows = None
        guided = [r for r in batch.generation_requests if r.grammar is not None]
        if guided and batch.draft_len:
            self._index = {request.request_id: i for i, request in enumerate(guided)}
            slot_ids = to_device([request.slot for request in guided], self._slots.device)
            windows = self._slots.window[:, : batch.shape.window].index_select(0, slot_ids)
            sent = [windows]
            if self._slots.shapes.has_trees:
                sent.append(self._slots.parents(slot_ids, batch.shape.window))
            self._windows = ToHost(sent, self._buffers)

    def apply(self, group: RowGroup, logits: torch.Tensor) -> None:
        """Masks the rows of the group's requests with grammars, in place. logits `[N * W, V]`."""
        rows = group.guided_rows
        if rows is None:
            return
        masks = torch.full((len(rows), self._num_words), -1, dtype=torch.int32)
        sizes = [group.window] * (len(rows) // group.window)
        guided = [request for request in group.requests if request.grammar is not None]
        for request, nodes, own in zip(
            guided, self._nodes(guided, group.window), masks.split_with_sizes(sizes), strict=True
        ):
            self._culprit, start = request, perf_counter()
            assert request.grammar is not None
            request.grammar.read(request.tokens, request.prompt_len)
            request.grammar.fill(nodes, own)
            if perf_counter() - start > MAX_FILL_SECONDS and self.limits_time:
                raise ValueError(f"its grammar takes more than {MAX_FILL_SECONDS} seconds a token")
        self._culprit = None
        mask_tokens(logits, rows, to_device(masks, logits.device))

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: the request whose grammar caused it; None if it was not raised
        here."""
        culprit, self._culprit = self._culprit, None
        return None if culprit is None else [culprit]

    def _nodes(self, requests: Sequence[LlmRequest], window: int) -> list[DraftNodes]:
        """The windows of the requests, without padding after the proposed drafts."""
        if window == 1:
            return [DraftNodes.chain(torch.zeros(1, dtype=torch.int64)) for _ in requests]
        assert self._windows is not None, "the round has not begun"
        windows, *parents = self._windows.wait()
        at = [self._index[request.request_id] for request in requests]
        if parents:
            return [DraftNodes.tree(windows[i], parents[0][i].tolist()) for i in at]
        return [
            DraftNodes.chain(windows[i, : 1 + request.py_num_draft_tokens])
            for i, request in zip(at, requests, strict=True)
        ]
