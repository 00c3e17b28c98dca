"""Logit edits that need the tokens on the host: the user's logits processors, and bad words of
several tokens.

These requests pay one device-to-host copy of their drafts a round; nobody else does. Each position
is edited with exactly the tokens that would stand before it, had the drafts been decoded one by
one."""

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup


class HostEdits:
    """Remembers the request whose code is running: whoever catches an exception asks `blame` who
    caused it."""

    def __init__(self) -> None:
        self._culprit: LlmRequest | None = None
        self._is_behind_drafts = False

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: who caused it; None if it was not raised here. Empty: it was raised
        behind drafts, where plain decoding may never come to. That request is not drafted for any
        more, and the next round will tell."""
        culprit, self._culprit = self._culprit, None
        if culprit is None:
            return None
        if self._is_behind_drafts:
            culprit.draft_limit = 0
            return []
        return [culprit]

    def apply(self, group: RowGroup, logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """logits `[N * W, V]`, drafts `[N, W-1]`. Returns the edited logits."""
        host_drafts = drafts[group.edited].tolist()
        logits = logits.clone()
        for index, row_drafts in zip(group.edited, host_drafts, strict=True):
            request = self._culprit = group.requests[index]
            # What stands behind the real drafts is padding: no user's code should ever see it.
            for offset in range(min(group.window, 1 + request.py_num_draft_tokens)):
                row, self._is_behind_drafts = index * group.window + offset, offset > 0
                logits[row] = _edit_row(request, request.tokens + row_drafts[:offset], logits[row])
        self._culprit = None
        return logits


def _edit_row(request: LlmRequest, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Raises ValueError when a processor returns something else than `[V]` logits."""
    for sequence in request.rules.bad_sequences:
        if tuple(tokens[1 - len(sequence) :]) == sequence[:-1]:
            logits[sequence[-1]] = -torch.inf
    for edit in request.rules.edits:
        logits = edit(request.request_id, list(tokens), logits)
    return logits
