"""Edits of logits in place: penalties, biases and processors, on the device and by the host."""

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.kernels.sampling.choose_token import choose_best

# Edits of logits before temperature (penalties, min_tokens), and the distribution of a greedy row.
# Pure functions over rows.
#
# Every row is one position of one request and is treated as if it were decoded alone. Nothing here
# knows requests, windows or acceptance.


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """logits, output_counts, in_prompt (bool): `[R, V]`; the three penalties: `[R, 1]`. Returns
    `[R, V]`.

    Repetition (Keskar et al., CTRL) counts prompt and output; it divides positive logits and
    multiplies negative ones. Presence and frequency count the output and are subtracted."""
    seen = output_counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen | in_prompt, scaled, logits)
    return logits - presence * seen - frequency * output_counts


def mask_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, too_early: torch.Tensor) -> None:
    """Excludes the stop ids, in place, in rows before min_tokens: `too_early` `[R]`. stop_ids
    `[R, E]` are padded by repetition; a negative first id means that the row has none."""
    blocked = too_early.unsqueeze(1) & (stop_ids >= 0)
    ids = stop_ids.clamp_min(0)
    logits.scatter_(1, ids, logits.gather(1, ids).masked_fill(blocked, -torch.inf))


def one_hot_of_best(logits: torch.Tensor) -> torch.Tensor:
    """`[R, V]` float32: all mass on the best token; NaN where no token can be chosen."""
    best = choose_best(logits)
    probs = torch.zeros_like(logits, dtype=torch.float32)
    probs.scatter_(1, best.clamp_min(0).unsqueeze(1), 1.0)
    return probs.masked_fill_((best < 0).unsqueeze(1), torch.nan)


# Logit edits that need the tokens on the host: the user's logits processors, and bad words of
# several tokens.
#
# These requests pay one device-to-host copy of their drafts per round; others pay nothing. Each
# position is edited with exactly the tokens that plain decoding would have before it.


class HostEdits:
    """Runs logits processors and bans bad words of several tokens. Keeps the request whose code is
    running, so that `blame` can name it after an exception."""

    def __init__(self) -> None:
        self._culprit: LlmRequest | None = None
        self._is_after_drafts = False

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: the requests that caused it; None if it was not raised here.

        Empty if it was raised after drafts, in a text that plain decoding may never produce. That
        request gets no more drafts, and fails in a later round if plain decoding fails."""
        culprit, self._culprit = self._culprit, None
        if culprit is None:
            return None
        if self._is_after_drafts:
            culprit.draft_limit = 0
            return []
        return [culprit]

    def apply(
        self,
        group: RowGroup,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        parents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """logits `[T, V]`, drafts `[N, W-1]`, parents `[N, W]`: of windows that are trees.
        Returns the edited logits."""
        host_drafts = drafts[group.edited].tolist()
        host_parents = None if parents is None else parents[group.edited].tolist()
        logits = logits.clone()
        for number, index in enumerate(group.edited):
            request = self._culprit = group.requests[index]
            own_drafts = host_drafts[number][: group.counts[index] - 1]
            paths = _paths(request, own_drafts, host_parents and host_parents[number])
            for row, path in paths.items():
                self._is_after_drafts = row > 0
                at = sum(group.counts[:index]) + row
                logits[at] = _edit_row(request, request.tokens + path, logits[at])
        self._culprit = None
        return logits


def _paths(
    request: LlmRequest, drafts: list[int], parents: list[int] | None
) -> dict[int, list[int]]:
    """The drafts up to each window row that may be accepted. After the proposed drafts comes
    padding, which no user's code should see. drafts: of rows 1 to W-1; parents: of a tree's
    rows."""
    if parents is None:
        num_rows = min(len(drafts), request.py_num_draft_tokens) + 1
        return {row: drafts[:row] for row in range(num_rows)}
    paths: dict[int, list[int]] = {0: []}
    for row, token in enumerate(drafts, 1):
        if parents[row] in paths:
            paths[row] = [*paths[parents[row]], token]
    return paths


def _edit_row(request: LlmRequest, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Edits one row `[V]`. Raises ValueError if a processor does not return `[V]` logits."""
    for sequence in request.rules.bad_sequences:
        if tuple(tokens[1 - len(sequence) :]) == sequence[:-1]:
            logits[sequence[-1]] = -torch.inf
    for edit in request.rules.edits:
        logits = edit(request.request_id, list(tokens), logits)
    return logits
