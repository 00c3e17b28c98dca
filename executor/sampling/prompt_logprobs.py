"""Log probabilities of prompt tokens, for requests that ask: from the context rows, chunk by
chunk."""

from collections.abc import Callable

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.logprobs import log_probabilities, logprob_entry, token_logprobs


def collect_prompt_logprobs(
    requests: list[LlmRequest],
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Fills `prompt_logprobs` of each request with what this round's rows say of the tokens after
    them.

    hidden `[T, H]`: the context chunks' rows one after another, before anything else. The first
    prompt token has no probability (None). A request that was preempted is not filled twice."""
    end = 0
    for request in requests:
        start, end = end, end + request.context_chunk
        num_best = request.rules.prompt_logprobs
        if num_best is None:
            continue
        known = request.prompt_logprobs = request.prompt_logprobs or [None]
        first, last = (
            len(known),
            min(request.prompt_len, request.kv_len + request.context_chunk + 1),
        )
        if first >= last:
            continue
        # A token is predicted by the row before it, and the chunk's rows begin at kv_len.
        shift = start - request.kv_len - 1
        rows = log_probabilities(compute_logits(hidden[shift + first : shift + last]))
        targets = torch.tensor(request.tokens[first:last], device=hidden.device)
        values, ids = token_logprobs(rows, targets, num_best)
        known += [
            logprob_entry(*row, num_best) for row in zip(values.tolist(), ids.tolist(), strict=True)
        ]
