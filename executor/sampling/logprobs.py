"""Log probabilities of emitted tokens, from the model's own logits (before penalties, bias, temperature and
filters)."""

import torch

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.outputs import Logprob


class LogprobRows:
    """What a round found. Tensors stay on the device until the host has their copies."""

    def __init__(self) -> None:
        self._found: list[tuple[list[LlmRequest], int]] = []
        self.tensors: list[torch.Tensor] = []  # values, then ids, of every group

    def add(self, group: RowGroup, raw: torch.Tensor, tokens: torch.Tensor) -> None:
        """raw `[M * W, V]`: log-softmax of the rows of the group's M requests that asked; tokens `[M, W]`: the
        emitted ones."""
        requests = [request for request in group.requests if request.rules.logprobs is not None]
        values, ids = token_logprobs(raw, tokens.flatten().clamp_min(0), group.num_logprobs)
        self._found.append((requests, group.window))
        self.tensors += [values, ids]

    def per_request(self, host: list[torch.Tensor]) -> dict[int, list[dict[int, Logprob]]]:
        """By request id, one entry for each of its W rows (the first `new_lens` of them are emitted). host: `tensors`,
        copied."""
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


def token_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """values, ids `[R, 2 + k]`: the token's log probability, the k best ones, and in the last id column its rank.

    raw `[R, V]` log-softmax; tokens `[R]`. The last value column is unused.
    """
    chosen = raw.gather(1, tokens.unsqueeze(1))
    rank = (raw > chosen).sum(dim=1, keepdim=True) + 1
    best = raw.topk(min(num_best, raw.shape[1]), dim=1)
    return (
        torch.cat((chosen, best.values, chosen), dim=1),
        torch.cat((tokens.unsqueeze(1), best.indices, rank), dim=1),
    )


def logprob_entry(values: list[float], ids: list[int], num_best: int) -> dict[int, Logprob]:
    """The k best tokens with their ranks, and the chosen token whatever its rank (first)."""
    entry = {ids[0]: Logprob(values[0], ids[-1])}
    for place in range(min(num_best, len(ids) - 2)):
        entry.setdefault(ids[1 + place], Logprob(values[1 + place], place + 1))
    return entry
