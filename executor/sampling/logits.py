"""Edits of logits: penalties, biases and processors, on the device and by the host. And the log
probabilities of emitted tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tllm_spec.config.option_checks import LOGITS
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.request import DecodingRules, LlmRequest, LogprobForm
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.kernels.drafts.top_tokens import best_columns
from tllm_spec.kernels.sampling.choose_token import choose_best
from tllm_spec.kernels.sampling.logit_filters import filter_cut
from tllm_spec.outputs import Logprob

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


# Bounds the memory that sampling takes next to the logits: large batches are sampled in parts.
#
# The bytes per logit are an upper bound of what the sampler's steps allocate at once on a CPU;
# `tests/executor/sampling/test_logits.py` compares them with the allocations.


SAMPLING_BYTES = 2 << 30
# Penalties, masks, filters, log probabilities, rejection sampling: float32 copies of the rows,
# 64-bit counts, sorted copies and their weights.
BYTES_PER_LOGIT = 52
# The fused kernels read logits in the model's own dtype: only the sampled rows are copied, and a
# filtered row has one int32 count for each 16-bit logit.
FILTER_BYTES_PER_ROW = 4 << 16


def rows_at_once(group: RowGroup, logits: torch.Tensor, *, rejection: bool) -> int:
    """How many of the group's logits `[R, V]` are sampled together."""
    vocab_size = logits.shape[1]
    is_fused = logits.is_cuda and logits.element_size() == 2
    if not is_fused or rejection or group.is_edited or group.with_logprobs:
        num_bytes = BYTES_PER_LOGIT * vocab_size
    elif group.sampled is None:
        return len(logits)
    else:
        filtering = FILTER_BYTES_PER_ROW if group.filtered else 0
        num_bytes = logits.element_size() * vocab_size + filtering
    return max(1, SAMPLING_BYTES // num_bytes)


@dataclass
class LogprobRows:
    """The log probabilities of one round. The tensors stay on the device until they are copied."""

    tensors: list[torch.Tensor] = field(default_factory=list)  # values, then ids, of every group
    _found: list[tuple[list[LlmRequest], int]] = field(default_factory=list)

    def add(
        self, group: RowGroup, form: LogprobForm, raw: torch.Tensor, sampled: SampledTokens
    ) -> None:
        """raw `[T, V]`: the values of the rows of the group's M requests that ask for this form."""
        requests = [request for request in group.requests if form.is_of(request.rules)]
        subset = group.with_logprobs[form]
        tokens = subset.take_requests(sampled.new_tokens)
        raw = subset.own.padded(raw).flatten(0, 1)
        if sampled.rows is not None:
            rows = subset.take_requests(sampled.rows)
            firsts = torch.arange(0, len(raw), group.rows.window, device=raw.device)
            raw = raw.index_select(0, (rows + firsts.unsqueeze(1)).flatten())
        values, ids = token_logprobs(raw, tokens.flatten().clamp_min(0), group.num_logprobs)
        self._found.append((requests, tokens.shape[1]))
        self.tensors += [values, ids]

    def per_request(self, host: list[torch.Tensor]) -> dict[int, list[dict[int, Logprob]]]:
        """The entries by request id: one for each token that a request could have been given, of
        which the first `new_lens` were emitted. host: the copies of `tensors`."""
        found: dict[int, list[dict[int, Logprob]]] = {}
        for (requests, window), values, ids in zip(self._found, host[::2], host[1::2], strict=True):
            rows = list(zip(values.tolist(), ids.tolist(), strict=True))
            for index, request in enumerate(requests):
                own = rows[index * window : (index + 1) * window]
                found[request.request_id] = [
                    logprob_entry(row_values, row_ids, request.rules.logprobs or 0)
                    for row_values, row_ids in own
                ]
        return found


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax in float32 of rows `[R, V]`: `[R, V']` with V' >= V, padded with -inf.

    torch's kernel adds up a row in an order that depends on whether the row begins at a multiple of
    16 bytes. With the padding all rows do."""
    return F.pad(logits.float(), (0, -logits.shape[1] % 4), value=-torch.inf).log_softmax(-1)


def token_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """values and ids `[R, 2 + k]`: of the token, then of the k best ones; the last id column is the
    token's rank, and the last value column is unused.

    raw `[R, V]` log-softmax or logits; tokens `[R]`. Of equal values the lowest id is the best."""
    chosen = raw.gather(1, tokens.unsqueeze(1))
    rank = (raw > chosen).sum(dim=1, keepdim=True) + 1
    best = best_columns(raw, min(num_best, raw.shape[1]))
    return (
        torch.cat((chosen, raw.gather(1, best), chosen), dim=1),
        torch.cat((tokens.unsqueeze(1), best, rank), dim=1),
    )


def logprob_entry(values: list[float], ids: list[int], num_best: int) -> dict[int, Logprob]:
    """The chosen token, then the k best ones, with their ranks."""
    entry = {ids[0]: Logprob(values[0], ids[-1])}
    for rank in range(1, 1 + min(num_best, len(ids) - 2)):
        entry.setdefault(ids[rank], Logprob(values[rank], rank))
    return entry


# Log probabilities of prompt tokens, for requests that ask for them: from the rows of their
# context, chunk by chunk.


def collect_prompt_logprobs(
    requests: list[LlmRequest],
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> None:
    """Adds to `prompt_logprobs` of each request what this round's rows say of the tokens after
    them.

    hidden `[T, H]`: the rows of the context chunks, one chunk after another, from row 0 on. The
    first prompt token has no probability (None), and none before `scored_from`. After a preemption
    nothing is added twice."""
    max_rows = max(1, SAMPLING_BYTES // (BYTES_PER_LOGIT * vocab_size))
    end = 0
    for request in requests:
        start, end = end, end + request.context_chunk
        if request.rules.prompt_logprobs is None:
            continue
        unknown: list[dict[int, Logprob] | None] = [None] * max(1, request.scored_from)
        known = request.prompt_logprobs = request.prompt_logprobs or unknown
        last = min(request.prompt_len, request.kv_len + request.context_chunk + 1)
        # A token is predicted by the row before it, and the chunk's rows begin at kv_len.
        row_of_token_0 = start - request.kv_len - 1
        while len(known) < last:
            first, stop = len(known), min(len(known) + max_rows, last)
            rows = hidden[row_of_token_0 + first : row_of_token_0 + stop]
            known += _entries(request, compute_logits(rows), first)


def _entries(
    request: LlmRequest, logits: torch.Tensor, first: int
) -> list[dict[int, Logprob] | None]:
    """Entries of the prompt tokens from `first` on, which the logits `[R, V]` predict."""
    rules = request.rules
    num_best = rules.prompt_logprobs or 0
    tokens = torch.tensor(request.tokens[first : first + len(logits)], device=logits.device)
    if request.scored_from and rules.logprob_form and rules.logprob_form.is_scaled:
        logits = _scaled(rules, logits)
    raw = logits.float() if rules.logprobs_mode in LOGITS else log_probabilities(logits)
    values, ids = token_logprobs(raw, tokens, num_best)
    return [
        logprob_entry(*row, num_best) for row in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def _scaled(rules: DecodingRules, logits: torch.Tensor) -> torch.Tensor:
    """As `Sampler.scaled`: rows `[R, V]` of one request."""
    values = logits.float() / rules.temperature
    if not rules.has_filters:
        return values
    floats = rules.temperature, rules.top_p, rules.min_p
    temperature, top_p, min_p = (values.new_full((len(values),), each) for each in floats)
    top_k = torch.full_like(temperature, rules.top_k or values.shape[1], dtype=torch.int64)
    cut = filter_cut(logits, temperature, top_k, top_p, min_p)
    return values.masked_fill(values < cut.unsqueeze(1), -torch.inf)
