"""Log probabilities of emitted tokens, from the model's own logits: before penalties, bias,
temperature and filters."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup, Subset
from tllm_spec.outputs import Logprob

# Bounds the memory that sampling takes next to the logits: large batches are sampled in parts.
#
# The bytes per logit are an upper bound of what the sampler's steps allocate at once on a CPU;
# `tests/executor/sampling/test_working_memory.py` compares them with the allocations.


SAMPLING_BYTES = 2 << 30
# Penalties, masks, filters, log probabilities, rejection sampling: float32 copies of the rows,
# 64-bit counts, sorted copies and their weights.
BYTES_PER_LOGIT = 56
# The fused kernels read logits in the model's own dtype: only the sampled rows are copied, and a
# filtered row has one int32 count for each 16-bit logit.
FILTER_BYTES_PER_ROW = 4 << 16


def bytes_per_row(group: RowGroup, logits: torch.Tensor, *, rejection: bool) -> int:
    """What sampling one row of the group's logits `[R, V]` allocates at most."""
    vocab_size = logits.shape[1]
    is_fused = logits.is_cuda and logits.element_size() == 2
    if not is_fused or rejection or group.is_edited or not group.with_logprobs.is_empty:
        return BYTES_PER_LOGIT * vocab_size
    if group.sampled.is_empty:
        return 0
    return logits.element_size() * vocab_size + (FILTER_BYTES_PER_ROW if group.filtered else 0)


def rows_at_once(bytes_per_row: int) -> int:
    return max(1, SAMPLING_BYTES // max(1, bytes_per_row))


class LogprobRows:
    """The log probabilities of one round. The tensors stay on the device until they are copied."""

    def __init__(self) -> None:
        self._found: list[tuple[list[LlmRequest], int]] = []
        self.tensors: list[torch.Tensor] = []  # values, then ids, of every group

    def add(
        self, group: RowGroup, raw: torch.Tensor, subset: Subset, sampled: SampledTokens
    ) -> None:
        """raw `[T, V]`: log-softmax of the rows of the group's M requests that ask for log
        probabilities, which are `subset`."""
        requests = [request for request in group.requests if request.rules.logprobs is not None]
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

    raw `[R, V]` log-softmax; tokens `[R]`. Of equal values the lowest id is the best."""
    chosen = raw.gather(1, tokens.unsqueeze(1))
    rank = (raw > chosen).sum(dim=1, keepdim=True) + 1
    best = _best_ids(raw, min(num_best, raw.shape[1]))
    return (
        torch.cat((chosen, raw.gather(1, best), chosen), dim=1),
        torch.cat((tokens.unsqueeze(1), best, rank), dim=1),
    )


def _best_ids(raw: torch.Tensor, number: int) -> torch.Tensor:
    """Ids of the largest entries of each row, equal ones by id.

    torch.topk leaves the order of equal entries open, and on CUDA it depends on the number of rows.
    So it gets distinct keys: the float's bits as an ordered integer, then the id."""
    bits = (raw + 0.0).view(torch.int32)  # -0 is 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(raw.shape[1], device=raw.device)
    keys = ordered * raw.shape[1] - ids
    return -keys.topk(number, dim=1).values % raw.shape[1]


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
    first prompt token has no probability (None). After a preemption nothing is added twice."""
    max_rows = rows_at_once(BYTES_PER_LOGIT * vocab_size)
    end = 0
    for request in requests:
        start, end = end, end + request.context_chunk
        if request.rules.prompt_logprobs is None:
            continue
        known = request.prompt_logprobs = request.prompt_logprobs or [None]
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
    num_best = request.rules.prompt_logprobs or 0
    tokens = torch.tensor(request.tokens[first : first + len(logits)], device=logits.device)
    values, ids = token_logprobs(log_probabilities(logits), tokens, num_best)
    return [
        logprob_entry(*row, num_best) for row in zip(values.tolist(), ids.tolist(), strict=True)
    ]
