"""Log probabilities of prompt tokens, for requests that ask for them: from the rows of their
context, chunk by chunk."""

from collections.abc import Callable

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.logprobs import log_probabilities, logprob_entry, token_logprobs
from tllm_spec.executor.sampling.working_memory import BYTES_PER_LOGIT, rows_at_once
from tllm_spec.outputs import Logprob


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
