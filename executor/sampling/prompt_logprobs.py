"""Log probabilities of prompt tokens, for requests that ask: from the context rows, chunk by chunk."""

from collections.abc import Callable

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.logprobs import logprob_entry, token_logprobs


def collect_prompt_logprobs(
    requests: list[LlmRequest],
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Fills `prompt_logprobs` of each request with what this round's rows say of the tokens after them.

    hidden `[T, H]`: the context chunks' rows one after another, before anything else. The first prompt token has no
    probability (None). A request that was preempted is not filled twice.
    """
    end = 0
    for request in requests:
        start, end = end, end + request.context_chunk
        num_best = request.rules.prompt_logprobs
        if num_best is None:
            continue
        known = request.prompt_logprobs = request.prompt_logprobs or [None]
        # Row i of the chunk stands at kv_len + i and predicts the token after it.
        tokens = request.tokens[request.kv_len + 1 : request.kv_len + request.context_chunk + 1]
        tokens = tokens[: request.prompt_len - request.kv_len - 1]
        skip = len(known) - 1 - request.kv_len
        if skip >= len(tokens):
            continue
        rows = compute_logits(hidden[start + skip : start + len(tokens)]).log_softmax(-1)
        targets = torch.tensor(tokens[skip:], device=hidden.device)
        values, ids = token_logprobs(rows, targets, num_best)
        known += [logprob_entry(*row, num_best) for row in zip(values.tolist(), ids.tolist(), strict=True)]
